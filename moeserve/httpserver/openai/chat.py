"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from moeserve.chatformat.events import CallArguments, CallBroken, CallStart, Event, Reasoning, Text
from moeserve.httpserver.generation.answers import Answer, AnswerReader, new_call_id
from moeserve.httpserver.generation.conversation import Conversation, Plan, plan
from moeserve.httpserver.generation.logprobs import chat_logprobs
from moeserve.httpserver.generation.model_text import ModelText
from moeserve.httpserver.generation.request_builder import Wish
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.generation.usage import prompt_progress
from moeserve.httpserver.openai.chat_body import ChatCompletionRequest
from moeserve.httpserver.openai.objects import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatFinishReason,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ToolCallDelta,
    UsageInfo,
)
from moeserve.httpserver.transport.body import documented, read_body
from moeserve.httpserver.transport.middleware import request_id_of
from moeserve.httpserver.transport.sse import EventStream, answer
from moeserve.messages.schema import TextItem

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    openapi_extra=documented(ChatCompletionRequest),
    responses={
        200: {"model": ChatCompletion, "description": "With stream true: chat.completion.chunk events."}
    },
)
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation through the model's chat template."""
    arrival = time.monotonic()
    body = await read_body(request, ChatCompletionRequest)
    work = ChatWork(service_of(request), body, f"chatcmpl-{request_id_of(request)}", arrival)
    return EventStream(work.chunks()) if body.stream else await answer(request, work.whole())


@dataclass
class ChatWork:
    service: Service
    body: ChatCompletionRequest
    id: str
    arrival: float

    def __post_init__(self) -> None:
        self.created = int(time.time())

    async def whole(self) -> ChatCompletion:
        planned = await self._plan()
        answers = await self.service.engine.complete(planned.requests)
        choices = [self._choice(index, planned, items) for index, items in enumerate(answers)]
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
            "usage": planned.tally.usage(),
            "timings": planned.tally.timings(),
        }

    async def chunks(self) -> AsyncGenerator[ChatCompletionChunk, None]:
        """The role of each choice, then its deltas, then its finish_reason with an empty one; at the end usage,
        where it was asked for."""
        planned = await self._plan()
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats
        greeted = False
        async with self.service.engine.start(planned.requests) as batch:
            async for index, item in batch:
                chunks = (
                    [] if greeted else [self._greeting(choice) for choice in range(len(planned.requests))]
                )
                greeted = True
                chunks += self._chunks_of(index, item, planned)
                now = planned.tally.usage() if continuous else None
                for chunk in chunks:
                    yield _with_usage(chunk, now) if with_usage else chunk
        if with_usage:
            last = _with_usage(self._envelope([]), planned.tally.usage())
            last["timings"] = planned.tally.timings()
            yield last

    async def _plan(self) -> Plan:
        """Raises ApiError."""
        body = self.body
        named = body.max_completion_tokens is not None
        wish = Wish(
            sampling=body.sampling(
                logprobs=body.top_logprobs if body.logprobs else None, prompt_logprobs=None
            ),
            text=body.text_options(),
            arrival=self.arrival,
            max_tokens=body.asked_tokens(),
            n=body.n,
            seed=body.seed,
            ignore_eos=body.ignore_eos,
            priority=body.priority,
            cache_salt=body.cache_salt,
            progress=body.return_progress,
            prompt_param="messages",
            max_tokens_param="max_completion_tokens" if named else "max_tokens",
        )
        chat = Conversation(
            model=body.model,
            messages=[message.for_template() for message in body.messages],
            wish=wish,
            tools=body.tool_use(),
            thought=body.thought(),
            constraint=body.constraint(),
            template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            show_reasoning=body.include_reasoning,
        )
        return await plan(self.service, chat)

    # ---- whole answers

    def _choice(self, index: int, planned: Plan, items: list[TextItem]) -> ChatChoice:
        reader, end = planned.readers[index], items[-1]
        found = Answer.of(event for item in items for event in reader.read(item))
        planned.tally.take(index, end, reader.reasoning_tokens)
        entries = [entry for item in items for entry in self._logprobs_of(planned.text, item)]
        return {
            "index": index,
            "message": _message(found),
            "logprobs": self._content(entries),
            "finish_reason": finish_reason(end, reader),
            "stop_reason": planned.stop_reason(end),
        }

    # ---- streams

    def _chunks_of(self, index: int, item: TextItem, planned: Plan) -> Iterator[ChatCompletionChunk]:
        if item.progress is not None:
            yield {**self._chunk(index, {}), "prompt_progress": prompt_progress(item.progress)}
            return
        reader = planned.readers[index]
        deltas = [_delta(event) for event in reader.read(item)]
        planned.tally.take(index, item, reader.reasoning_tokens)
        entries = self._logprobs_of(planned.text, item)
        if entries and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            yield self._chunk(index, delta, entries)
            entries = []
        if item.finish_reason is None:
            return
        last = self._chunk(index, {})
        last["choices"][0]["finish_reason"] = finish_reason(item, reader)
        last["choices"][0]["stop_reason"] = planned.stop_reason(item)
        if planned.tally.all_finished:
            last["timings"] = planned.tally.timings()
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
            "model": self.service.model_name,
            "choices": choices,
        }

    def _logprobs_of(self, text: ModelText, item: TextItem) -> list[ChatLogprob]:
        if not self.body.logprobs or not item.logprobs:
            return []
        return chat_logprobs(
            text, item.logprobs, self.body.top_logprobs, self.body.return_tokens_as_token_ids
        )

    def _content(self, entries: list[ChatLogprob]) -> ChatLogprobs | None:
        return {"content": entries, "refusal": None} if self.body.logprobs else None


def finish_reason(end: TextItem, reader: AnswerReader) -> ChatFinishReason | None:
    return "tool_calls" if end.finish_reason == "stop" and reader.num_calls else end.finish_reason


def _with_usage(chunk: ChatCompletionChunk, usage: UsageInfo | None) -> ChatCompletionChunk:
    return {**chunk, "usage": usage}


def _message(found: Answer) -> ChatMessage:
    message: ChatMessage = {"role": "assistant", "content": found.text, "refusal": None}
    if found.reasoning:
        message["reasoning"] = message["reasoning_content"] = found.reasoning
    if found.calls:
        message["content"] = found.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in found.calls
        ]
    return message


def _delta(event: Event) -> ChatDelta:
    match event:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallStart(index, name):
            start: ToolCallDelta = {
                "index": index,
                "id": new_call_id(),
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            return {"tool_calls": [start]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallBroken(_, _, rest):
            return {"content": rest}
    return {}
