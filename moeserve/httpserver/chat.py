"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.admission import Wish
from moeserve.httpserver.body import documented, read_body
from moeserve.httpserver.logprobs import chat_logprobs
from moeserve.httpserver.middleware import request_id_of
from moeserve.httpserver.model_text import ModelText
from moeserve.httpserver.protocol.chat import ChatCompletionRequest
from moeserve.httpserver.protocol.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
)
from moeserve.httpserver.service import Service, service_of
from moeserve.httpserver.sse import EventStream, answer
from moeserve.httpserver.usage import UsageTally
from moeserve.messages.schema import GenerateRequest, TextItem

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
        text, requests, tally = await self._prepare()
        answers = await self.service.engine.complete(requests)
        for index, items in enumerate(answers):
            tally.take(index, items[-1])
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.service.model_name,
            "choices": [self._choice(index, text, items) for index, items in enumerate(answers)],
            "usage": tally.usage(),
            "timings": tally.timings(),
        }

    async def chunks(self) -> AsyncGenerator[ChatCompletionChunk, None]:
        """The role of each choice, then its text, then its finish_reason with an empty delta; at the end
        usage, where it was asked for."""
        text, requests, tally = await self._prepare()
        options = self.body.stream_options
        usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats
        greeted = False
        async with self.service.engine.start(requests) as batch:
            async for index, item in batch:
                tally.take(index, item)
                now = tally.usage() if continuous else None
                if not greeted:
                    greeted = True
                    for choice in range(len(requests)):
                        chunk = self._chunk(choice, {"role": "assistant", "content": ""})
                        yield chunk | {"usage": now} if usage else chunk
                entries = self._logprobs_of(text, item)
                if item.text or entries:
                    chunk = self._chunk(index, {"content": item.text}, entries)
                    yield chunk | {"usage": now} if usage else chunk
                if item.finish_reason is not None:
                    chunk = self._chunk(index, {}, end=item)
                    if tally.all_finished:
                        chunk["timings"] = tally.timings()
                    yield chunk | {"usage": now} if usage else chunk
        if usage:
            yield self._envelope([]) | {"usage": tally.usage(), "timings": tally.timings()}

    async def _prepare(self) -> tuple[ModelText, list[GenerateRequest], UsageTally]:
        """Everything that may refuse the request. Raises ApiError."""
        body = self.body
        text, limit = self.service.ready(body.model)
        prompt = await text.encode_chat(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            kwargs=body.chat_template_kwargs,
            limit=limit,
        )
        completion_named = body.max_completion_tokens is not None
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
            prompt_param="messages",
            max_tokens_param="max_completion_tokens" if completion_named else "max_tokens",
        )
        requests = self.service.admission.requests(text, [prompt], wish)
        return text, requests, UsageTally([len(prompt)], body.n)

    def _logprobs_of(self, text: ModelText, item: TextItem) -> list[ChatLogprob]:
        if not self.body.logprobs or not item.logprobs:
            return []
        return chat_logprobs(
            text, item.logprobs, self.body.top_logprobs, self.body.return_tokens_as_token_ids
        )

    def _content(self, entries: list[ChatLogprob]) -> ChatLogprobs | None:
        return {"content": entries, "refusal": None} if self.body.logprobs else None

    def _choice(self, index: int, text: ModelText, items: list[TextItem]) -> ChatChoice:
        end = items[-1]
        content = "".join(item.text for item in items)
        entries = [entry for item in items for entry in self._logprobs_of(text, item)]
        return {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": self._content(entries),
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        entries: list[ChatLogprob] | None = None,
        end: TextItem | None = None,
    ) -> ChatCompletionChunk:
        choice: ChatChunkChoice = {
            "index": index,
            "delta": delta,
            "logprobs": self._content(entries) if entries else None,
            "finish_reason": None,
        }
        if end is not None:
            choice["finish_reason"] = end.finish_reason
            choice["stop_reason"] = end.stop_reason
        return self._envelope([choice])

    def _envelope(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
        }
