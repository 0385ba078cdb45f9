"""GenerationStream: the answers to one HTTP request, in the order in which they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from moeserve.httpserver.generation.engine.delivery import Delivered, Delivery
from moeserve.httpserver.generation.engine.request_deadline import request_deadline
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.observability import generation_span
from moeserve.httpserver.observability.generation_span import Operation
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.messages.sampling import RequestContext
from moeserve.messages.schema import GenerateRequest
from moeserve.processes.tracing import Span, Tracer


class Engine(Protocol):
    """The part of `EngineClient` that a stream uses. The client puts items into a stream's delivery and has
    no reference to the stream."""

    tracer: Tracer | None
    metrics: Metrics
    request_timeout: float | None  # seconds from a request's arrival until its answer must be complete

    async def submit(self, requests: Sequence[GenerateRequest], delivery: Delivery) -> None: ...

    def abort(self, delivery: Delivery) -> None: ...


class GenerationStream:
    """Iterating it yields (index of the request, item); the last item of each index has a finish_reason and usage.
    Leaving the `async with` aborts every generation that has not ended: the client disconnected, another generation
    failed, or the task was cancelled."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[GenerateRequest],
        caller: Caller,
        operation: Operation = "chat",
    ) -> None:
        self._engine = engine
        self._caller = caller
        self._requests = requests
        self._operation = operation
        self._unfinished = len(requests)
        self._span: Span | None = None
        caller.record.started(requests)
        self._delivery = Delivery(requests, caller.record)

    async def __aenter__(self) -> GenerationStream:
        """Sends the requests. Raises ApiError 503."""
        self._begin_span()
        try:
            await self._engine.submit(self._requests, self._delivery)
        except BaseException:  # cancellation too; it is raised again
            await self.__aexit__()
            raise
        self._caller.admit()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._engine.abort(self._delivery)
        if self._span is not None:
            generation_span.end(self._span, self._caller.record)

    def _begin_span(self) -> None:
        tracer, trace = self._engine.tracer, self._caller.record.trace
        if tracer is None or not trace:
            return
        self._span = generation_span.begin(
            tracer, trace, self._operation, self._engine.metrics.model_name, self._requests
        )
        context = RequestContext(self._requests[0].context.request_id, self._span.traceparent)
        self._requests = [msgspec.structs.replace(request, context=context) for request in self._requests]

    async def _next(self) -> Delivered:
        limit = None if self._caller.is_background else self._engine.request_timeout
        if limit is None:
            return await self._delivery.take()
        async with request_deadline(self._requests[0].arrival, limit):
            return await self._delivery.take()

    async def __aiter__(self) -> AsyncIterator[Delivered]:
        """Raises ApiError when one generation fails: the whole request then fails."""
        while self._unfinished:
            index, item = await self._next()
            if item.finish_reason is not None:
                self._unfinished -= 1
            yield index, item
