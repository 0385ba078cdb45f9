"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.generation.beside_streams import beside_streams, values_of
from moeserve.httpserver.generation.chat.answers import Answer, AnswerReader
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.logprobs import (
    ChatLogprob,
    chat_logprobs,
    encoded_chat_logprobs,
    prompt_logprobs,
)
from moeserve.httpserver.generation.prepare import prepare
from moeserve.httpserver.generation.prepared import PreparedRequest
from moeserve.httpserver.generation.request.caller import Caller, caller_of
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.generation.usage import UsageInfo, prompt_progress
from moeserve.httpserver.openai.chat_answer import ChatAnswer
from moeserve.httpserver.openai.chat_body import ChatCompletionRequest
from moeserve.httpserver.openai.objects import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
)
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.refuse import request_id_of
from moeserve.httpserver.transport.sse import EventStream, answer
from moeserve.messages.schema import TextItem

router = APIRouter(tags=["OpenAI"], route_class=DocumentedRoute)


@router.post(
    "/v1/chat/completions",
    openapi_extra=documented(
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 256},
        stream=ChatCompletionChunk,
    ),
    responses={
        200: {"model": ChatCompletion, "description": "With stream true: chat.completion.chunk events."}
    },
)
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation through the model's chat template."""
    caller = caller_of(request)
    body = await read_body(request, ChatCompletionRequest)
    handler = ChatHandler(service_of(request), body, f"chatcmpl-{request_id_of(request)}", caller)
    return EventStream(handler.chunks()) if body.stream else await answer(request, handler.whole())


@dataclass
class ChatHandler:
    service: Service
    body: ChatCompletionRequest
    id: str
    caller: Caller

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self._answers: list[ChatAnswer] = []  # one for each choice; for streams only

    async def whole(self) -> ChatCompletion:
        prepared = await self._prepare()
        answers = await prepared.complete()
        choices = await beside_streams(values_of(answers), self._choices, prepared, answers)
        whole: ChatCompletion = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.service.answering(self.body.model),
            "choices": choices,
            "usage": prepared.tally.usage(),
            "timings": prepared.tally.timings(),
        }
        if self.body.prompt_logprobs is not None:
            top = self.body.prompt_logprobs
            whole["prompt_logprobs"] = await asyncio.to_thread(
                prompt_logprobs, prepared.text, answers[0], top
            )
        return whole

    async def chunks(self) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Yields, for each choice, a chunk with the role, its deltas and an empty delta with its finish_reason; then
        the usage, if it was asked for."""
        prepared = await self._prepare()
        self._answers = [self._answer() for _ in prepared.readers]
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats
        greeted = False
        async with prepared.stream() as stream:
            async for index, item in stream:
                chunks = (
                    [] if greeted else [self._greeting(choice) for choice in range(len(prepared.requests))]
                )
                greeted = True
                chunks += self._chunks_of(index, item, prepared)
                now = prepared.tally.usage() if continuous else None
                for chunk in chunks:
                    yield _with_usage(chunk, now) if with_usage else chunk
        if with_usage:
            last = _with_usage(self._envelope([]), prepared.tally.usage())
            last["timings"] = prepared.tally.timings()
            yield last

    async def _prepare(self) -> PreparedRequest:
        """Raises ApiError."""
        return await prepare(self.service, self.body.asked(self.caller))

    def _answer(self) -> ChatAnswer:
        return ChatAnswer(self.body.custom_tools, is_legacy=bool(self.body.functions))

    # ---- complete answers

    def _choices(self, prepared: PreparedRequest, answers: list[list[TextItem]]) -> list[ChatChoice]:
        return [self._choice(index, prepared, items) for index, items in enumerate(answers)]

    def _choice(self, index: int, prepared: PreparedRequest, items: list[TextItem]) -> ChatChoice:
        reader, end = prepared.readers[index], items[-1]
        found = Answer.of(event for item in items for event in reader.read(item))
        prepared.tally.take(index, end, reader.reasoning_tokens)
        logprobs: ChatLogprobs | None = None
        if self.body.logprobs:
            tokens = [token for item in items for token in item.logprobs or ()]
            as_ids = self.body.return_tokens_as_token_ids
            logprobs = {
                "content": encoded_chat_logprobs(prepared.text, tokens, self.body.top_logprobs, as_ids),
                "refusal": None,
            }
        choice: ChatChoice = {
            "index": index,
            "message": self._answer().message(found),
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(end, reader),
            "stop_reason": prepared.stop_reason(end),
        }
        if end.score is not None:
            choice["beam_score"] = end.score
        return choice

    # ---- streams

    def _chunks_of(
        self, index: int, item: TextItem, prepared: PreparedRequest
    ) -> Iterator[ChatCompletionChunk]:
        if item.progress is not None:
            yield {**self._chunk(index, {}), "prompt_progress": prompt_progress(item.progress)}
            return
        reader = prepared.readers[index]
        written = (self._answers[index].delta(event) for event in reader.read(item))
        deltas = [delta for delta in written if delta is not None]
        prepared.tally.take(index, item, reader.reasoning_tokens)
        entries = self._logprobs_of(prepared.text, item)
        if entries and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            yield self._chunk(index, delta, entries)
            entries = []
        if item.finish_reason is None:
            return
        last = self._chunk(index, {})
        last["choices"][0]["finish_reason"] = self._finish_reason(item, reader)
        last["choices"][0]["stop_reason"] = prepared.stop_reason(item)
        if prepared.tally.all_finished:
            last["timings"] = prepared.tally.timings()
        yield last

    def _greeting(self, index: int) -> ChatCompletionChunk:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def _chunk(
        self, index: int, delta: ChatDelta, entries: list[ChatLogprob] | None = None
    ) -> ChatCompletionChunk:
        choice: ChatChunkChoice = {
            "index": index,
            "delta": delta,
            "logprobs": self._content(entries) if entries else None,
            "finish_reason": None,
        }
        return self._envelope([choice])

    def _envelope(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.service.answering(self.body.model),
            "choices": choices,
        }

    def _logprobs_of(self, text: ModelText, item: TextItem) -> list[ChatLogprob]:
        if not self.body.logprobs or not item.logprobs:
            return []
        return chat_logprobs(
            text, item.logprobs, self.body.top_logprobs, self.body.return_tokens_as_token_ids
        )

    def _finish_reason(self, end: TextItem, reader: AnswerReader) -> ChatFinishReason | None:
        reason = finish_reason(end, reader)
        return "function_call" if self.body.functions and reason == "tool_calls" else reason

    def _content(self, entries: list[ChatLogprob]) -> ChatLogprobs | None:
        return {"content": entries, "refusal": None} if self.body.logprobs else None


def finish_reason(end: TextItem, reader: AnswerReader) -> ChatFinishReason | None:
    return "tool_calls" if end.finish_reason == "stop" and reader.num_calls else end.finish_reason


def _with_usage(chunk: ChatCompletionChunk, usage: UsageInfo | None) -> ChatCompletionChunk:
    return {**chunk, "usage": usage}
