"""GenerationStream: the generations of one HTTP request, and what is known of each while it runs."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from moeserve.httpserver.generation.engine.prompt_scores import PromptScores
from moeserve.httpserver.observability import generation_span
from moeserve.httpserver.observability.generation_span import Operation
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.httpserver.observability.request_record import (
    RequestRecord,
    record_of_request,
    trace_of_request,
)
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.sampling import RequestContext
from moeserve.messages.schema import GenerateRequest, Resumed, TextItem, Usage
from moeserve.processes.tracing import Span, Tracer


class Submitter(Protocol):
    """What a stream needs of `EngineClient`."""

    tracer: Tracer | None
    metrics: Metrics
    request_timeout: float | None  # seconds from a request's arrival until its answer must be whole

    async def submit(self, stream: GenerationStream, requests: Sequence[GenerateRequest]) -> None: ...

    def abort(self, stream: GenerationStream) -> None: ...


@dataclass(slots=True)
class RunningGeneration:
    """One choice of one prompt while it runs. Only `EngineClient` writes it.

    It holds what another router or detokenizer needs to go on, should one be lost: the request and the answer's tokens.
    """

    index: int
    stream: GenerationStream
    request: GenerateRequest
    output: array[int] = field(default_factory=lambda: array("i"))  # tokens received
    num_scored: int = 0  # prompt positions whose logprobs were received
    cached_tokens: int | None = None
    first_token_at: float | None = None  # when tokens came, time.monotonic()
    last_token_at: float | None = None
    crashed_at: int = -1  # len(output) when a process that may have crashed of it did

    @property
    def has_begun(self) -> bool:
        return bool(self.output) or self.num_scored > 0

    def received(self, item: TextItem, now: float) -> None:
        if item.prompt_logprobs is not None:
            self.num_scored += len(item.prompt_logprobs)
        if item.token_ids:
            if self.first_token_at is None:
                self.first_token_at, self.cached_tokens = now, item.cached_tokens
            self.last_token_at = now
            self.output.extend(item.token_ids)

    def resumed(self, new_id: int) -> GenerateRequest:
        """The request for the rest. Its id is new, so that nothing of the old one's can be taken for it."""
        so_far = Resumed(self.output.tobytes(), self.num_scored, self.cached_tokens, self.first_token_at)
        self.request = msgspec.structs.replace(self.request, id=new_id, resumed=so_far)
        return self.request

    def usage_so_far(self) -> Usage:
        """For a generation that is cut short. Times and cached tokens come with the last message only, so they are
        0."""
        return Usage(len(self.request.token_ids) // 4, len(self.output), 0, 0.0, 0.0, 0.0)


class GenerationStream:
    """The generations of one HTTP request. Iterating it yields (index of the request, item); the last item of each
    index has a finish_reason and usage. Leaving the `async with` aborts every generation that has not ended: the
    client disconnected, another generation failed, or the task was cancelled."""

    def __init__(self, engine: Submitter, requests: Sequence[GenerateRequest], operation: Operation) -> None:
        self._engine = engine
        self._requests = requests
        self._operation = operation
        self._queue: asyncio.Queue[tuple[int, TextItem] | ApiError] = asyncio.Queue()
        self._unfinished = len(requests)
        self._scores = PromptScores(requests)
        self._span: Span | None = None
        self.record = record_of_request.get() or RequestRecord(time.monotonic())
        self.record.started(requests)
        self.open: set[int] = set()  # ids that will get a final message; written by EngineClient

    def put(self, message: tuple[int, TextItem] | ApiError) -> None:
        for one in [message] if isinstance(message, ApiError) else self._scores.given_out(*message):
            self._queue.put_nowait(one)

    async def __aenter__(self) -> GenerationStream:
        """Sends the requests. Raises ApiError 503."""
        self._begin_span()
        try:
            await self._engine.submit(self, self._requests)
        except BaseException:  # cancellation too; it is raised again
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._engine.abort(self)
        if self._span is not None:
            generation_span.end(self._span, self.record)

    def _begin_span(self) -> None:
        tracer, trace = self._engine.tracer, trace_of_request.get()
        if tracer is None or not trace:
            return
        self._span = generation_span.begin(
            tracer, trace, self._operation, self._engine.metrics.model_name, self._requests
        )
        context = RequestContext(self._requests[0].context.request_id, self._span.traceparent)
        self._requests = [msgspec.structs.replace(request, context=context) for request in self._requests]

    async def _next(self) -> tuple[int, TextItem] | ApiError:
        limit = self._engine.request_timeout
        if limit is None:
            return await self._queue.get()
        try:
            left = self._requests[0].arrival + limit - time.monotonic()
            async with asyncio.timeout(max(left, 0.0)):
                return await self._queue.get()
        except TimeoutError:
            message = f"the answer was not whole after {limit:g} s, the server's limit"
            return ApiError(504, message, code="request_timeout")

    async def __aiter__(self) -> AsyncIterator[tuple[int, TextItem]]:
        """Raises ApiError when one generation fails; the request then fails as a whole."""
        while self._unfinished:
            message = await self._next()
            if isinstance(message, ApiError):
                raise message
            if message[1].finish_reason is not None:
                self._unfinished -= 1
            yield message
