"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.generation.logprobs import CompletionLogprobsWriter, joined
from moeserve.httpserver.generation.model_text import ModelText
from moeserve.httpserver.generation.request_builder import Wish
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.generation.structured_output import constrain
from moeserve.httpserver.generation.usage import UsageTally, prompt_progress
from moeserve.httpserver.openai.completion_body import DEFAULT_MAX_TOKENS, CompletionRequest, Prompt
from moeserve.httpserver.openai.objects import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from moeserve.httpserver.transport.body import documented, read_body
from moeserve.httpserver.transport.middleware import request_id_of
from moeserve.httpserver.transport.sse import EventStream, answer
from moeserve.messages.schema import GenerateRequest, TextItem

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/completions",
    openapi_extra=documented(CompletionRequest),
    responses={200: {"model": Completion, "description": "With stream true: chunks of the same shape."}},
)
async def create_completion(request: Request) -> Response:
    """Completes prompts."""
    arrival = time.monotonic()
    body = await read_body(request, CompletionRequest)
    work = CompletionWork(service_of(request), body, f"cmpl-{request_id_of(request)}", arrival)
    return EventStream(work.chunks()) if body.stream else await answer(request, work.whole())


@dataclass(slots=True)
class Echo:
    """A prompt and, where it is echoed, its text."""

    ids: list[int]
    text: str = ""


class ChoiceWriter:
    """Turns the items of one choice into text and logprobs; the first brings the echo."""

    def __init__(self, text: ModelText, body: CompletionRequest, prompt: Echo) -> None:
        self._echo: Echo | None = prompt if body.echo else None
        self._prompt_ids: list[int] | None = prompt.ids
        self._with_ids = body.return_token_ids
        top = body.logprobs
        as_ids = body.return_tokens_as_token_ids
        self._logprobs = None if top is None else CompletionLogprobsWriter(text, top, as_ids)

    def write(self, item: TextItem) -> tuple[str, CompletionLogprobs | None]:
        echo, self._echo = self._echo, None
        text = item.text if echo is None else echo.text + item.text
        if self._logprobs is None:
            return text, None
        parts = [] if echo is None else [self._logprobs.first_prompt_token(echo.ids[0])]
        for tokens in (item.prompt_logprobs, item.logprobs):
            if tokens:
                parts.append(self._logprobs.write(tokens))
        return text, joined(parts)

    def choice(
        self, index: int, text: str, logprobs: CompletionLogprobs | None, end: TextItem, token_ids: list[int]
    ) -> CompletionChoice:
        """A piece of the choice, or all of it; `end` is its last item."""
        choice: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }
        if self._with_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        return choice


@dataclass
class CompletionWork:
    service: Service
    body: CompletionRequest
    id: str
    arrival: float

    def __post_init__(self) -> None:
        self.created = int(time.time())

    async def whole(self) -> Completion:
        requests, writers, tally = await self._prepare()
        answers = await self.service.engine.complete(requests)
        choices = []
        for index, (items, writer) in enumerate(zip(answers, writers, strict=True)):
            tally.take(index, items[-1])
            parts = [writer.write(item) for item in items]
            text = "".join(text for text, _ in parts)
            logprobs = [part for _, part in parts if part is not None]
            ids = [token for item in items for token in item.token_ids]
            choices.append(writer.choice(index, text, joined(logprobs) if logprobs else None, items[-1], ids))
        return self._envelope(choices) | {"usage": tally.usage(), "timings": tally.timings()}

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        requests, writers, tally = await self._prepare()
        body, options = self.body, self.body.stream_options
        async with self.service.engine.start(requests) as batch:
            async for index, item in batch:
                tally.take(index, item)
                text, logprobs = writers[index].write(item)
                told = (logprobs and logprobs["tokens"]) or (body.return_token_ids and item.token_ids)
                if item.finish_reason is None and not text and not told and item.progress is None:
                    continue  # a token whose text is held back: part of a character or of a stop string
                choice = writers[index].choice(index, text, logprobs, item, item.token_ids)
                chunk = self._envelope([choice])
                if options is not None and options.include_usage:
                    chunk["usage"] = tally.usage() if options.continuous_usage_stats else None
                if item.progress is not None:
                    chunk["prompt_progress"] = prompt_progress(item.progress)
                if tally.all_finished:
                    chunk["timings"] = tally.timings()
                yield chunk
        if options is not None and options.include_usage:
            yield self._envelope([]) | {"usage": tally.usage(), "timings": tally.timings()}

    async def _prepare(self) -> tuple[list[GenerateRequest], list[ChoiceWriter], UsageTally]:
        """Everything that may refuse the request. Raises ApiError."""
        body = self.body
        text, limit = self.service.ready(body.model)
        prompts = await _encode(text, body.prompts, limit)
        wish = Wish(
            sampling=body.sampling(
                logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None
            ),
            text=body.text_options(),
            arrival=self.arrival,
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            n=body.n,
            seed=body.seed,
            ignore_eos=body.ignore_eos,
            priority=body.priority,
            cache_salt=body.cache_salt,
            progress=body.return_progress,
        )
        if (constraint := body.constraint()) is not None:
            wish = await constrain(self.service.grammars, wish, constraint)
        requests = self.service.admission.requests(text, prompts, wish)
        echoes = [
            Echo(ids, await _prompt_text(text, prompt, ids) if body.echo else "")
            for prompt, ids in zip(body.prompts, prompts, strict=True)
        ]
        writers = [ChoiceWriter(text, body, echo) for echo in echoes for _ in range(body.n)]
        return requests, writers, UsageTally([len(ids) for ids in prompts], body.n)

    def _envelope(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
        }


async def _encode(text: ModelText, prompts: list[Prompt], limit: int) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await text.encode(texts, limit=limit, param="prompt") if texts else [])
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]


async def _prompt_text(text: ModelText, prompt: Prompt, ids: list[int]) -> str:
    return prompt if isinstance(prompt, str) else await text.decode(ids)
