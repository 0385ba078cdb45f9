"""/api/chat and /api/generate: lines of JSON, or one object with `"stream": false`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from moeserve.chatformat.events import CallArguments, CallBroken, CallEnd, CallStart, Event, Reasoning, Text
from moeserve.httpserver.generation.chat.answers import new_call_id
from moeserve.httpserver.generation.logprobs import chat_logprobs
from moeserve.httpserver.generation.prepare import prepare
from moeserve.httpserver.generation.prepared import PreparedRequest
from moeserve.httpserver.generation.request.caller import Caller, caller_of
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.ollama.bodies import ChatBody, GenerateBody, served_name
from moeserve.httpserver.ollama.objects import Call, ChatLine, ChatMessage, Figures, GenerateLine
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.lone_surrogates import without_lone_surrogates
from moeserve.httpserver.transport.openapi import JSON_LINES, documented
from moeserve.httpserver.transport.sse import JsonLines, answer
from moeserve.messages.schema import TextItem

router = APIRouter(tags=["Ollama"], route_class=DocumentedRoute)

_NS: Final = 1_000_000  # nanoseconds in a millisecond


@router.post(
    "/api/chat",
    openapi_extra=documented(
        ChatBody,
        {"model": "", "messages": [{"role": "user", "content": "Hello"}], "stream": False},
        stream=ChatLine,
        media_type=JSON_LINES,
    ),
    responses={200: {"model": ChatLine, "description": "Unless stream is false: one such object a line."}},
)
async def chat(request: Request) -> Response:
    """Answers a conversation in Ollama's format."""
    caller = caller_of(request)
    return await _answered(request, await read_body(request, ChatBody), caller)


@router.post(
    "/api/generate",
    openapi_extra=documented(
        GenerateBody,
        {"model": "", "prompt": "Hello", "stream": False},
        stream=GenerateLine,
        media_type=JSON_LINES,
    ),
    responses={
        200: {"model": GenerateLine, "description": "Unless stream is false: one such object a line."}
    },
)
async def generate(request: Request) -> Response:
    """Answers a prompt in Ollama's format."""
    caller = caller_of(request)
    return await _answered(request, await read_body(request, GenerateBody), caller)


async def _answered(request: Request, body: ChatBody | GenerateBody, caller: Caller) -> Response:
    handler = OllamaHandler(service_of(request), body, caller)
    if body.stream:
        return JsonLines(handler.lines(), error_body=lambda error: {"error": error.message})
    return await answer(request, handler.whole())


@dataclass
class OllamaHandler:
    service: Service
    body: ChatBody | GenerateBody
    caller: Caller

    async def whole(self) -> Mapping[str, Any]:
        """Returns a stream's lines joined into one object."""
        text = thinking = ""
        calls: list[Call] = []
        logprobs: list[Any] = []
        last: Mapping[str, Any] = {}
        async for last in self.lines():
            piece = last.get("message", last)
            text += piece.get("content", piece.get("response", ""))
            thinking += piece.get("thinking", "")
            calls += piece.get("tool_calls", [])
            logprobs += last.get("logprobs", [])
        return {
            **last,
            **self._piece(text, thinking, calls),
            **({"logprobs": logprobs} if self.body.logprobs else {}),
        }

    async def lines(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yields the lines of the streamed answer. Raises ApiError if the request ends with an error."""
        self.service.ready(served_name(self.body.model))
        if self.body.only_loads:
            yield {**self._line("", "", []), "done": True, "done_reason": "load"}
            return
        prepared = await prepare(self.service, self.body.asked(self.caller))
        reader = _Reader(prepared)
        async with prepared.stream() as stream:
            async for index, item in stream:
                prepared.tally.take(index, item)
                text, thinking, calls = reader.read(item)
                logprobs = self._logprobs(prepared, item)
                if text or thinking or calls or logprobs:
                    yield {**self._line(text, thinking, calls), **logprobs}
                if item.finish_reason is not None:
                    yield {**self._line("", "", []), "done": True, **self._figures(prepared, item)}

    def _logprobs(self, prepared: PreparedRequest, item: TextItem) -> dict[str, Any]:
        """Returns the log-probabilities of the item; an empty dict if they were not asked for."""
        if not self.body.logprobs or not item.logprobs:
            return {}
        found = chat_logprobs(prepared.text, item.logprobs, self.body.top_logprobs, as_ids=False)
        if self.body.top_logprobs:
            return {"logprobs": found}
        plain = [{"token": o["token"], "logprob": o["logprob"], "bytes": o["bytes"]} for o in found]
        return {"logprobs": plain}

    def _line(self, text: str, thinking: str, calls: list[Call]) -> dict[str, Any]:
        return {
            "model": self.body.model,
            "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            **self._piece(text, thinking, calls),
            "done": False,
        }

    def _piece(self, text: str, thinking: str, calls: list[Call]) -> dict[str, Any]:
        if isinstance(self.body, GenerateBody):
            return {"response": text} | ({"thinking": thinking} if thinking else {})
        message: ChatMessage = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _figures(self, prepared: PreparedRequest, end: TextItem) -> Figures:
        usage, timings = prepared.tally.usage(), prepared.tally.timings()
        return {
            "done_reason": "length" if end.finish_reason == "length" else "stop",
            "total_duration": int((time.monotonic() - self.caller.arrival) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": int(timings["prefill_ms"] * _NS),
            "eval_count": usage["completion_tokens"],
            "eval_duration": int(timings["decode_ms"] * _NS),
        }


class _Reader:
    """Reads text, reasoning and calls from an answer. Calls are held until complete, because Ollama sends no partial
    calls."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._reader = prepared.readers[0] if prepared.readers else None
        self._name = self._arguments = ""

    def read(self, item: TextItem) -> tuple[str, str, list[Call]]:
        if self._reader is None:
            return item.text, "", []
        text = thinking = ""
        calls: list[Call] = []
        for event in self._reader.read(item):
            match event:
                case Text(piece):
                    text += piece
                case CallBroken(_, raw, _):
                    text += raw
                case Reasoning(piece):
                    thinking += piece
                case _:
                    calls += self._call(event)
        return text, thinking, calls

    def _call(self, event: Event) -> list[Call]:
        match event:
            case CallStart(_, name):
                self._name, self._arguments = name, ""
            case CallArguments(_, piece):
                self._arguments += piece
            case CallEnd(index):
                try:
                    arguments = json.loads(without_lone_surrogates(self._arguments))
                except ValueError as error:  # the parser has read it as an object
                    raise ApiError(500, f"a call's arguments are no JSON: {error}") from error
                function: Any = {"index": index, "name": self._name, "arguments": arguments}
                return [{"id": new_call_id(), "function": function}]
        return []
