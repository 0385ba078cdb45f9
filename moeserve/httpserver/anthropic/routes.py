"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson
from fastapi import APIRouter, Request, Response

from moeserve.chatformat.events import CallArguments, CallBroken, CallStart, Event, Reasoning, Text
from moeserve.httpserver.anthropic.bodies import CountTokensRequest, MessagesRequest
from moeserve.httpserver.anthropic.objects import (
    ContentBlock,
    Message,
    MessageEvent,
    MessagesUsage,
    StopReason,
    TokenCount,
)
from moeserve.httpserver.generation.answers import Answer, AnswerReader, Call, new_call_id
from moeserve.httpserver.generation.conversation import Conversation, Plan, plan, prompt_of
from moeserve.httpserver.generation.request_builder import Wish
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.generation.usage import UsageTally
from moeserve.httpserver.transport.body import documented, read_body
from moeserve.httpserver.transport.errors import messages_error
from moeserve.httpserver.transport.middleware import request_id_of
from moeserve.httpserver.transport.sse import EventStream, answer
from moeserve.messages.schema import SamplingParams, TextItem, TextOptions

router = APIRouter(tags=["Anthropic"])

# Clients send it back with the thought; there is nothing for it to protect here.
_SIGNATURE: Final = "unsigned"


@router.post(
    "/v1/messages",
    openapi_extra=documented(MessagesRequest),
    responses={200: {"model": Message, "description": "With stream true: Anthropic's events."}},
)
async def create_message(request: Request) -> Response:
    """Answers a conversation, Anthropic's way."""
    arrival = time.monotonic()
    body = await read_body(request, MessagesRequest)
    request_id = request_id_of(request)
    work = MessagesWork(service_of(request), body, f"msg_{request_id}", arrival)
    if not body.stream:
        return await answer(request, work.whole())
    return EventStream(
        work.events(), end=b"", named=True, error_body=lambda error: messages_error(error, request_id)
    )


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=documented(CountTokensRequest),
    responses={200: {"model": TokenCount}},
)
async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation's prompt has."""
    body = await read_body(request, CountTokensRequest)
    return await answer(request, _count(service_of(request), body))


async def _count(service: Service, body: CountTokensRequest) -> TokenCount:
    text, limit = service.ready(body.model)
    wish = Wish(SamplingParams(max_tokens=0), TextOptions(), 0.0, None, prompt_param="messages")
    return {"input_tokens": len(await prompt_of(text, limit, _conversation(body, wish)))}


def _conversation(body: CountTokensRequest, wish: Wish) -> Conversation:
    return Conversation(
        model=body.model,
        messages=body.for_template(),
        wish=wish,
        tools=body.tool_use(),
        thought=body.thought(),
        constraint=body.constraint(),
    )


@dataclass
class MessagesWork:
    service: Service
    body: MessagesRequest
    id: str
    arrival: float

    async def whole(self) -> Message:
        planned = await self._plan()
        (items,) = await self.service.engine.complete(planned.requests)
        (reader,) = planned.readers
        found = Answer.of(event for item in items for event in reader.read(item))
        planned.tally.take(0, items[-1])
        reason, sequence = self._stop(items[-1], reader, planned)
        return {
            **self._message(planned.tally),
            "content": _content(found),
            "stop_reason": reason,
            "stop_sequence": sequence,
        }

    async def events(self) -> AsyncGenerator[MessageEvent, None]:
        planned = await self._plan()
        (reader,) = planned.readers
        writer = BlockWriter()
        begun = False
        async with self.service.engine.start(planned.requests) as batch:
            async for index, item in batch:
                if not begun:
                    begun = True
                    yield _event("message_start", message=self._message(planned.tally))
                    yield _event("ping")
                planned.tally.take(index, item)
                for event in reader.read(item):
                    for out in writer.write(event):
                        yield out
                if item.finish_reason is None:
                    continue
                for out in writer.close():
                    yield out
                reason, sequence = self._stop(item, reader, planned)
                delta = {"stop_reason": reason, "stop_sequence": sequence}
                yield _event("message_delta", delta=delta, usage=_usage(planned.tally))
                yield _event("message_stop")

    async def _plan(self) -> Plan:
        body = self.body
        wish = Wish(
            sampling=SamplingParams(
                max_tokens=0, temperature=body.temperature, top_k=body.top_k, top_p=body.top_p
            ),
            text=TextOptions(stop=tuple(body.stop_sequences)),
            arrival=self.arrival,
            max_tokens=None,
            default_max_tokens=body.max_tokens,
            prompt_param="messages",
        )
        return await plan(self.service, _conversation(body, wish))

    def _message(self, tally: UsageTally) -> Message:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.service.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(tally),
        }

    def _stop(
        self, end: TextItem, reader: AnswerReader, planned: Plan
    ) -> tuple[StopReason | None, str | None]:
        if end.finish_reason == "length":
            cut_short = planned.requests[0].sampling.max_tokens < self.body.max_tokens
            return "model_context_window_exceeded" if cut_short else "max_tokens", None
        if isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        return "tool_use" if reader.num_calls else "end_turn", None


class BlockWriter:
    """Events as Anthropic's content blocks: one is open at a time, its index counts up."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""

    def write(self, event: Event) -> Iterator[MessageEvent]:
        match event:
            case Text(text) | CallBroken(_, _, text):
                yield from self._text(text)
            case Reasoning(thought):
                if self._kind != "thinking":
                    yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta(type="thinking_delta", thinking=thought)
            case CallStart(_, name):
                yield from self._open({"type": "tool_use", "id": new_call_id(), "name": name, "input": {}})
            case CallArguments(_, text):
                yield self._delta(type="input_json_delta", partial_json=text)

    def close(self) -> Iterator[MessageEvent]:
        """Ends the open block, where there is one."""
        if self._kind == "thinking":
            yield self._delta(type="signature_delta", signature=_SIGNATURE)
        if self._kind:
            yield _event("content_block_stop", index=self._index)
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
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: str) -> MessageEvent:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(type: str, **fields: Any) -> MessageEvent:
    return {"type": type, **fields}  # type: ignore[typeddict-item]


def _content(found: Answer) -> list[ContentBlock]:
    blocks: list[ContentBlock] = []
    if found.reasoning:
        blocks.append({"type": "thinking", "thinking": found.reasoning, "signature": _SIGNATURE})
    if found.text:
        blocks.append({"type": "text", "text": found.text})
    return blocks + [_tool_use(call) for call in found.calls]


def _tool_use(call: Call) -> ContentBlock:
    """As text where the arguments are beyond what JSON libraries take: a lone surrogate, say."""
    try:
        given = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return {"type": "text", "text": f"{call.name}({call.arguments})"}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _usage(tally: UsageTally) -> MessagesUsage:
    usage = tally.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }
