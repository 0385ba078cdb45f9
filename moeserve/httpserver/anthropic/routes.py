"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.anthropic.blocks import BlockWriter, content_blocks, event
from moeserve.httpserver.anthropic.bodies import CountTokensRequest, MessagesRequest
from moeserve.httpserver.anthropic.context_edits import edited
from moeserve.httpserver.anthropic.errors import messages_error
from moeserve.httpserver.anthropic.messages import AnyMessage
from moeserve.httpserver.anthropic.objects import (
    AppliedEdit,
    AppliedEdits,
    Message,
    MessageEvent,
    MessagesUsage,
    StopReason,
    TokenCount,
)
from moeserve.httpserver.generation.chat.answers import Answer, AnswerReader
from moeserve.httpserver.generation.prepare import count_prompt_tokens, prepare
from moeserve.httpserver.generation.prepared import PreparedRequest
from moeserve.httpserver.generation.request.caller import Caller, caller_of
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.generation.usage import UsageTally
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.refuse import request_id_of
from moeserve.httpserver.transport.sse import EventStream, answer
from moeserve.messages.schema import TextItem

router = APIRouter(tags=["Anthropic"], route_class=DocumentedRoute)

Body = TypeVar("Body", bound=CountTokensRequest)


@router.post(
    "/v1/messages",
    openapi_extra=documented(
        MessagesRequest,
        {"model": "", "max_tokens": 256, "messages": [{"role": "user", "content": "Hello"}]},
        stream=MessageEvent,
    ),
    responses={200: {"model": Message, "description": "With stream true: Anthropic's events."}},
)
async def create_message(request: Request) -> Response:
    """Answers a conversation in Anthropic's format."""
    caller = caller_of(request)
    body = await read_body(request, MessagesRequest)
    request_id = request_id_of(request)
    handler = MessagesHandler(service_of(request), body, f"msg_{request_id}", caller)
    if not body.stream:
        return await answer(request, handler.whole())
    return EventStream(
        handler.events(), end=b"", named=True, error_body=lambda error: messages_error(error, request_id)
    )


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=documented(
        CountTokensRequest, {"model": "", "messages": [{"role": "user", "content": "Hello"}]}
    ),
    responses={200: {"model": TokenCount}},
)
async def count_tokens(request: Request) -> Response:
    """Counts the tokens of a conversation's prompt."""
    caller = caller_of(request)
    body = await read_body(request, CountTokensRequest)
    return await answer(request, _count(service_of(request), body, caller))


async def _count(service: Service, body: CountTokensRequest, caller: Caller) -> TokenCount:
    counted: TokenCount = {"input_tokens": 0}
    if body.context_management is not None:
        original = await _tokens(service, body, caller)
        counted["context_management"] = {"original_input_tokens": original}
        body, _ = await _edited(service, body, caller)
    counted["input_tokens"] = await _tokens(service, body, caller)
    return counted


async def _tokens(service: Service, body: CountTokensRequest, caller: Caller) -> int:
    return await count_prompt_tokens(service, body.asked(caller))


async def _edited(service: Service, body: Body, caller: Caller) -> tuple[Body, list[AppliedEdit]]:
    """Returns the body with its context edits applied, and the parts that they left out."""
    assert body.context_management is not None
    of_messages = partial(_with_messages, body)
    messages, applied = await edited(
        body.messages, body.context_management.edits, lambda some: _tokens(service, of_messages(some), caller)
    )
    return of_messages(messages), applied


def _with_messages(body: Body, messages: Sequence[AnyMessage]) -> Body:
    return body.model_copy(update={"messages": list(messages)})


@dataclass
class MessagesHandler:
    service: Service
    body: MessagesRequest
    id: str
    caller: Caller

    def __post_init__(self) -> None:
        self._applied: list[AppliedEdit] = []

    async def whole(self) -> Message:
        prepared = await self._prepare()
        (items,) = await prepared.complete()
        (reader,) = prepared.readers
        found = Answer.of(parsed for item in items for parsed in reader.read(item))
        prepared.tally.take(0, items[-1])
        reason, sequence = self._stop(items[-1], reader, prepared)
        message: Message = {
            **self._message(prepared.tally),
            "content": content_blocks(found),
            "stop_reason": reason,
            "stop_sequence": sequence,
        }
        if (done := self._edits()) is not None:
            message["context_management"] = done
        return message

    async def events(self) -> AsyncGenerator[MessageEvent, None]:
        prepared = await self._prepare()
        (reader,) = prepared.readers
        writer = BlockWriter()
        begun = False
        async with prepared.stream() as stream:
            async for index, item in stream:
                if not begun:
                    begun = True
                    yield event("message_start", message=self._message(prepared.tally))
                    yield event("ping")
                prepared.tally.take(index, item)
                for parsed in reader.read(item):
                    for out in writer.write(parsed):
                        yield out
                if item.finish_reason is None:
                    continue
                for out in writer.close():
                    yield out
                reason, sequence = self._stop(item, reader, prepared)
                delta = {"stop_reason": reason, "stop_sequence": sequence}
                edits = self._edits()
                told = {} if edits is None else {"context_management": edits}
                yield event("message_delta", delta=delta, usage=_usage(prepared.tally), **told)
                yield event("message_stop")

    async def _prepare(self) -> PreparedRequest:
        """Applies the context edits that the request asks for, and prepares it. Raises ApiError."""
        if self.body.context_management is not None:
            self.body, self._applied = await _edited(self.service, self.body, self.caller)
        return await prepare(self.service, self.body.asked(self.caller))

    def _edits(self) -> AppliedEdits | None:
        """The effects of the request's context edits; None without context edits."""
        return None if self.body.context_management is None else {"applied_edits": self._applied}

    def _message(self, tally: UsageTally) -> Message:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.service.answering(self.body.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(tally),
        }

    def _stop(
        self, end: TextItem, reader: AnswerReader, prepared: PreparedRequest
    ) -> tuple[StopReason | None, str | None]:
        if end.finish_reason == "length":
            cut_short = prepared.requests[0].sampling.max_tokens < self.body.max_tokens
            return "model_context_window_exceeded" if cut_short else "max_tokens", None
        if isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        return "tool_use" if reader.num_calls else "end_turn", None


def _usage(tally: UsageTally) -> MessagesUsage:
    usage = tally.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }
