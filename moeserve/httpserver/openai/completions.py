"""/v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.generation.beside_streams import beside_streams, values_of
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.logprobs import prompt_logprobs
from moeserve.httpserver.generation.prepare import prepare
from moeserve.httpserver.generation.prepared import PreparedRequest
from moeserve.httpserver.generation.request.caller import Caller, caller_of
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.generation.usage import prompt_progress
from moeserve.httpserver.openai.best_of import best_answers
from moeserve.httpserver.openai.completion_body import CompletionRequest, Prompt
from moeserve.httpserver.openai.completion_logprobs import (
    CompletionLogprobsWriter,
    EchoedLogprobs,
    TextOffsets,
    encoded_logprobs,
    joined,
)
from moeserve.httpserver.openai.objects import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.refuse import request_id_of
from moeserve.httpserver.transport.sse import EventStream, answer
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.schema import TextItem

router = APIRouter(tags=["OpenAI"], route_class=DocumentedRoute)


@router.post(
    "/v1/completions",
    openapi_extra=documented(
        CompletionRequest, {"prompt": "Once upon a time", "max_tokens": 32}, stream=Completion
    ),
    responses={200: {"model": Completion, "description": "With stream true: chunks of the same shape."}},
)
async def create_completion(request: Request) -> Response:
    """Completes prompts."""
    caller = caller_of(request)
    body = await read_body(request, CompletionRequest)
    handler = CompletionHandler(service_of(request), body, f"cmpl-{request_id_of(request)}", caller)
    return EventStream(handler.chunks()) if body.stream else await answer(request, handler.whole())


@dataclass(slots=True)
class Echo:
    """A prompt, its text if it is echoed, and the log-probabilities that its choices share."""

    ids: list[int]
    text: str = ""
    begins_unseen: bool = False  # the first token is the model's begin-of-text token, not part of the text
    writer: CompletionLogprobsWriter | None = None
    scored: EchoedLogprobs | None = None
    # The newest piece of the prompt's log-probabilities in a stream. All choices get it in turn.
    first_piece: CompletionLogprobs | None = None
    last_piece: tuple[list[TokenLogprob], CompletionLogprobs] | None = None


class ChoiceWriter:
    """Turns the items of one choice into text and log-probabilities; the first item also yields the echoed prompt."""

    def __init__(self, text: ModelText, body: CompletionRequest, prompt: Echo) -> None:
        self._prompt = prompt
        self._echo: Echo | None = prompt if body.echo else None
        self._prompt_ids: list[int] | None = prompt.ids
        self._with_ids = body.return_token_ids
        self._logprobs: CompletionLogprobsWriter | None = None
        if body.logprobs is None:
            return
        start, skips = len(prompt.text), body.skip_special_tokens
        self._logprobs = self._writer(text, body, TextOffsets(text, start=start, skips_special=skips))
        if body.echo and prompt.writer is None:
            offsets = TextOffsets(text, skips_special=False, hides_first=prompt.begins_unseen)
            prompt.writer = self._writer(text, body, offsets)

    @staticmethod
    def _writer(text: ModelText, body: CompletionRequest, offsets: TextOffsets) -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(text, body.logprobs or 0, body.return_tokens_as_token_ids, offsets)

    def write(self, item: TextItem) -> tuple[str, CompletionLogprobs | None]:
        echo, self._echo = self._echo, None
        text = item.text if echo is None else echo.text + item.text
        if self._logprobs is None:
            return text, None
        parts = [] if echo is None or echo.writer is None else [self._first_of_prompt(echo.writer)]
        if item.prompt_logprobs and self._prompt.writer is not None:
            parts.append(self._of_prompt(self._prompt.writer, item.prompt_logprobs))
        if item.logprobs:
            parts.append(self._logprobs.write(item.logprobs))
        return text, joined(parts)

    def _first_of_prompt(self, writer: CompletionLogprobsWriter) -> CompletionLogprobs:
        """Returns the prompt's first entries; all its choices get the same object."""
        prompt = self._prompt
        if prompt.first_piece is None:
            prompt.first_piece = writer.first_prompt_token(prompt.ids[0])
        return prompt.first_piece

    def _of_prompt(self, writer: CompletionLogprobsWriter, tokens: list[TokenLogprob]) -> CompletionLogprobs:
        """Returns the next entries of the prompt; all its choices get the same objects."""
        last = self._prompt.last_piece
        if last is None or last[0] is not tokens:
            last = self._prompt.last_piece = tokens, writer.write(tokens)
        return last[1]

    def whole(self, items: Sequence[TextItem]) -> tuple[str, CompletionLogprobs | None]:
        """Returns the text and log-probabilities of all items."""
        prompt, writer = self._prompt, self._logprobs
        text = "".join(item.text for item in items)
        if self._echo is not None:
            text = prompt.text + text
        if writer is None:
            return text, None
        answer = [token for item in items for token in item.logprobs or ()]
        if prompt.writer is None:
            return text, encoded_logprobs(writer, answer)
        if prompt.scored is None:
            of_prompt = [token for item in items for token in item.prompt_logprobs or ()]
            prompt.scored = EchoedLogprobs(prompt.writer, prompt.ids[0], of_prompt)
        return text, prompt.scored.followed_by(writer, answer)

    def choice(
        self, index: int, text: str, logprobs: CompletionLogprobs | None, end: TextItem, token_ids: list[int]
    ) -> CompletionChoice:
        """Returns a piece of the choice, or the complete choice. `end` is its last item."""
        choice: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }
        if end.score is not None:
            choice["beam_score"] = end.score
        if self._with_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        return choice


@dataclass
class CompletionHandler:
    service: Service
    body: CompletionRequest
    id: str
    caller: Caller

    def __post_init__(self) -> None:
        self.created = int(time.time())

    async def whole(self) -> Completion:
        prepared, writers = await self._prepare()
        tally = prepared.tally
        answers: Sequence[Sequence[TextItem]] = await prepared.complete()
        for index, items in enumerate(answers):
            tally.take(index, items[-1])
        if self.body.num_candidates > self.body.n:
            answers = best_answers(answers, self.body.num_candidates, self.body.n)
        top = self.body.prompt_logprobs
        choices = await beside_streams(values_of(answers), _choices, answers, writers)
        if top is not None:
            for first in range(0, len(choices), self.body.n):
                scored = await asyncio.to_thread(prompt_logprobs, prepared.text, answers[first], top)
                for choice in choices[first : first + self.body.n]:
                    choice["prompt_logprobs"] = scored
        return self._envelope(choices) | {"usage": tally.usage(), "timings": tally.timings()}

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        prepared, writers = await self._prepare()
        tally = prepared.tally
        body, options = self.body, self.body.stream_options
        async with prepared.stream() as stream:
            async for index, item in stream:
                tally.take(index, item)
                text, logprobs = writers[index].write(item)
                told = (logprobs and logprobs["tokens"]) or (body.return_token_ids and item.token_ids)
                if item.finish_reason is None and not text and not told and item.progress is None:
                    continue  # the token's text is held back: part of a character or of a stop string
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

    async def _prepare(self) -> tuple[PreparedRequest, list[ChoiceWriter]]:
        """Returns the request and a writer for each choice of the answer. Raises ApiError."""
        body = self.body
        prepared = await prepare(self.service, body.asked(self.caller))
        text = prepared.text
        echoes = [
            await self._echo(text, prompt, ids)
            for prompt, ids in zip(body.prompts, prepared.resolved.prompts, strict=True)
        ]
        return prepared, [ChoiceWriter(text, body, echo) for echo in echoes for _ in range(body.n)]

    async def _echo(self, text: ModelText, prompt: Prompt, ids: list[int]) -> Echo:
        if not self.body.echo:
            return Echo(ids)
        if isinstance(prompt, str) and self.body.truncate_prompt_tokens is None:
            return Echo(ids, prompt, begins_unseen=text.adds_bos)
        return Echo(ids, await text.decode(ids))

    def _envelope(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.answering(self.body.model),
            "choices": choices,
        }


def _choices(
    answers: Sequence[Sequence[TextItem]], writers: Sequence[ChoiceWriter]
) -> list[CompletionChoice]:
    choices = []
    for index, (items, writer) in enumerate(zip(answers, writers, strict=True)):
        text, logprobs = writer.whole(items)
        ids = [token for item in items for token in item.token_ids]
        choices.append(writer.choice(index, text, logprobs, items[-1], ids))
    return choices
