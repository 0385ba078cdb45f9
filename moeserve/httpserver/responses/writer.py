"""Writes an answer as the output items of /v1/responses, or as the events that build them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from moeserve.chatformat.events import CallArguments, CallBroken, CallEnd, CallStart, Event, Reasoning, Text
from moeserve.httpserver.generation.chat.answers import Answer, Call, new_call_id
from moeserve.httpserver.generation.logprobs import ChatLogprob
from moeserve.httpserver.generation.request.custom_tools import input_of
from moeserve.httpserver.responses.client_tools import CLIENT_TOOLS
from moeserve.httpserver.responses.items import opaque
from moeserve.httpserver.responses.objects import (
    ContentPart,
    ItemStatus,
    OutputItem,
    ResponseEvent,
)
from moeserve.httpserver.responses.tools import Toolbox


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def _message(text: str, logprobs: list[ChatLogprob], status: ItemStatus) -> OutputItem:
    part: ContentPart = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {
        "id": new_id("msg"),
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [part],
    }


def _reasoning_item(text: str, encrypt: bool, status: ItemStatus) -> OutputItem:
    item: OutputItem = {
        "id": new_id("rs"),
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }
    if encrypt:
        item["encrypted_content"] = opaque(text)
    return item


def _call(call: Call, toolbox: Toolbox, status: ItemStatus) -> OutputItem:
    """Returns the call as an item of its tool's type. While the call is in progress the item has no arguments."""
    tool = toolbox.called(call.name)
    name = call.name if tool is None else tool.name
    place: dict[str, Any] = {"call_id": call.id}
    if tool is not None and tool.namespace is not None:
        place["namespace"] = tool.namespace
    item: dict[str, Any]
    match tool.kind if tool is not None else "function":
        case "custom":
            given = input_of(call.arguments) if status != "in_progress" else ""
            item = {"id": new_id("ctc"), "type": "custom_tool_call", "name": name, "input": given}
        case kind if (known := CLIENT_TOOLS.get(kind)) is not None:
            value = known.read(call.arguments)
            item = {"id": new_id(known.id_prefix), "type": f"{kind}_call", known.field: value}
        case _:
            arguments = call.arguments
            item = {"id": new_id("fc"), "type": "function_call", "name": name, "arguments": arguments}
    return {**item, "status": status, **place}  # type: ignore[typeddict-item]


def output_of(
    found: Answer, logprobs: list[ChatLogprob], toolbox: Toolbox, *, encrypt: bool, is_cut: bool
) -> list[OutputItem]:
    """Returns the items of a complete answer. is_cut: the answer reached its token limit, so its last item is
    incomplete unless it is a call."""
    items = [_reasoning_item(found.reasoning, encrypt, "completed")] if found.reasoning else []
    if found.text:
        items.append(_message(found.text, logprobs, "completed"))
    items += [_call(call, toolbox, "completed") for call in found.calls]
    if is_cut and items and not found.calls:
        items[-1]["status"] = "incomplete"
    return items


class ItemWriter:
    """Makes events in OpenAI's order, with one open item at a time. `output` holds the items so far."""

    def __init__(self, toolbox: Toolbox, *, encrypt: bool) -> None:
        self.output: list[OutputItem] = []
        self._toolbox = toolbox
        self._call = Call("", "")  # the newest call
        self._encrypt = encrypt
        self._is_open = False
        self._sequence = 0

    def event(self, type: str, **fields: Any) -> ResponseEvent:
        self._sequence += 1
        return {"type": type, **fields, "sequence_number": self._sequence - 1}  # type: ignore[typeddict-item]

    def write(self, event: Event, logprobs: list[ChatLogprob]) -> Iterator[ResponseEvent]:
        """Yields the API's events for one parsed event. logprobs: its tokens' log-probabilities."""
        match event:
            case Text(text) | CallBroken(_, _, text):
                if isinstance(event, CallBroken):
                    yield from self.close("incomplete")
                if text:
                    yield from self._text(text, logprobs)
            case Reasoning(text):
                yield from self._reasoning(text)
            case CallStart(_, name):
                self._call = Call(new_call_id(), name)
                yield from self._open(_call(self._call, self._toolbox, "in_progress"))
            case CallArguments(_, text):
                self._call.arguments += text
                if self.output[-1]["type"] == "function_call":
                    self.output[-1]["arguments"] += text
                    yield self._about("function_call_arguments.delta", delta=text)
            case CallEnd():
                yield from self.close("completed")

    def close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._about("function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        elif item["type"] == "custom_tool_call":
            item["input"] = input_of(self._call.arguments)
            yield self._about("custom_tool_call_input.delta", delta=item["input"])
            yield self._about("custom_tool_call_input.done", input=item["input"])
        elif (known := CLIENT_TOOLS.get(item["type"].removesuffix("_call"))) is not None:
            item[known.field] = known.read(self._call.arguments)  # type: ignore[literal-required]
        else:
            (part,) = item["content"]
            about = {"text": part["text"]}
            if item["type"] == "message":
                yield self._about("output_text.done", content_index=0, logprobs=part["logprobs"], **about)
            else:
                yield self._about("reasoning_text.done", content_index=0, **about)
                if self._encrypt:
                    item["encrypted_content"] = opaque(part["text"])
            yield self._about("content_part.done", content_index=0, part=dict(part))
        yield self.event("response.output_item.done", output_index=len(self.output) - 1, item=_snapshot(item))

    def _text(self, text: str, logprobs: list[ChatLogprob]) -> Iterator[ResponseEvent]:
        if not self._is_open or self.output[-1]["type"] != "message":
            yield from self._open(_message("", [], "in_progress"))
        part = self.output[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._about("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if not self._is_open or self.output[-1]["type"] != "reasoning":
            yield from self._open(_reasoning_item("", False, "in_progress"))
        self.output[-1]["content"][0]["text"] += text
        yield self._about("reasoning_text.delta", content_index=0, delta=text)

    def _open(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self.close("completed")
        self.output.append(item)
        self._is_open = True
        bare = _snapshot(item)
        if "content" in item:
            bare["content"] = []
        yield self.event("response.output_item.added", output_index=len(self.output) - 1, item=bare)
        if "content" in item:
            yield self._about("content_part.added", content_index=0, part=dict(item["content"][0]))

    def _about(self, what: str, **fields: Any) -> ResponseEvent:
        """Returns an event about the open item."""
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        return self.event(f"response.{what}", **place, **fields)


def _snapshot(item: OutputItem) -> OutputItem:
    """Returns a copy of the item as it is now; the item itself continues to change."""
    copy = item.copy()
    if "content" in item:
        copy["content"] = [part.copy() for part in item["content"]]
    return copy
