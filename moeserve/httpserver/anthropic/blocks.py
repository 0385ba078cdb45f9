"""An answer as Anthropic's content blocks, complete or as the events that build them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import orjson

from moeserve.chatformat.events import CallArguments, CallBroken, CallStart, Event, Reasoning, Text
from moeserve.httpserver.anthropic.objects import ContentBlock, MessageEvent
from moeserve.httpserver.generation.chat.answers import Answer, Call, new_call_id
from moeserve.httpserver.transport.lone_surrogates import without_lone_surrogates

# The API requires a signature, which clients send back with the thinking; this server does not check it.
_SIGNATURE: Final = "unsigned"


class BlockWriter:
    """Writes an answer as the events of Anthropic's content blocks. One block is open at a time; indices count up."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""

    def write(self, parsed: Event) -> Iterator[MessageEvent]:
        match parsed:
            case Text(text) | CallBroken(_, _, text):
                yield from self._text(text)
            case Reasoning(reasoning):
                if self._kind != "thinking":
                    yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta(type="thinking_delta", thinking=reasoning)
            case CallStart(_, name):
                yield from self._open({"type": "tool_use", "id": new_call_id(), "name": name, "input": {}})
            case CallArguments(_, text):
                yield self._delta(type="input_json_delta", partial_json=text)

    def close(self) -> Iterator[MessageEvent]:
        """Ends the open block, if there is one."""
        if self._kind == "thinking":
            yield self._delta(type="signature_delta", signature=_SIGNATURE)
        if self._kind:
            yield event("content_block_stop", index=self._index)
        self._kind = ""

    def _text(self, text: str) -> Iterator[MessageEvent]:
        if not text:
            return
        if self._kind != "text":
            yield from self._open({"type": "text", "text": ""})
        yield self._delta(type="text_delta", text=text)

    def _open(self, block: ContentBlock) -> Iterator[MessageEvent]:
        yield from self.close()
        self._index += 1
        self._kind = block["type"]
        yield event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: str) -> MessageEvent:
        return event("content_block_delta", index=self._index, delta=delta)


def event(type: str, **fields: Any) -> MessageEvent:
    return {"type": type, **fields}  # type: ignore[typeddict-item]


def content_blocks(found: Answer) -> list[ContentBlock]:
    """Returns a complete answer as content blocks."""
    blocks: list[ContentBlock] = []
    if found.reasoning:
        blocks.append({"type": "thinking", "thinking": found.reasoning, "signature": _SIGNATURE})
    if found.text:
        blocks.append({"type": "text", "text": found.text})
    return blocks + [_tool_use(call) for call in found.calls]


def _tool_use(call: Call) -> ContentBlock:
    """Returns a tool_use block; a text block if orjson cannot parse the arguments (nested too deep, say)."""
    try:
        given = orjson.loads(without_lone_surrogates(call.arguments))
    except orjson.JSONDecodeError:
        return {"type": "text", "text": f"{call.name}({call.arguments})"}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}
