"""EngineClient: sends requests to the router and receives their text.

One HTTP request is one `GenerationStream` of one or more generations: one for each choice of each prompt. The stream's
queue is the only buffer between the engine and the client's socket. The request itself bounds it: a generation yields
at most max_tokens tokens in at most as many items, and what was asked of its prompt. So a client that does not read
holds its own request's tokens and nothing else, for at most `sse.SEND_TIMEOUT_S`.

When the router or the detokenizer is lost, every open generation is sent again with the tokens that it has, under
another id: what the lost process had sent or not sent of the old one does not matter.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from moeserve.httpserver.generation.engine.batches import batches_of
from moeserve.httpserver.generation.engine.expert_use import ExpertUseFeed
from moeserve.httpserver.generation.engine.generation_stream import GenerationStream, RunningGeneration
from moeserve.httpserver.generation.engine.queue_room import QueueRoom
from moeserve.httpserver.generation.engine.served_adapters import ServedAdapters
from moeserve.httpserver.generation.engine.silences import Silences
from moeserve.httpserver.observability.generation_span import Operation
from moeserve.httpserver.observability.load_totals import LoadTotals
from moeserve.httpserver.observability.metrics import Metrics, Status
from moeserve.httpserver.transport import turns
from moeserve.httpserver.transport.errors import ApiError, shutting_down
from moeserve.messages.adapters import AdapterAnswer, AdaptersServed, ServedAdapter
from moeserve.messages.async_channels import AsyncPullChannel, AsyncPushChannel
from moeserve.messages.channels import ChannelFull
from moeserve.messages.load import LoadReport
from moeserve.messages.refusal import Refusal
from moeserve.messages.sampling import FinishReason
from moeserve.messages.schema import (
    Abort,
    EngineLost,
    EngineReady,
    GenerateBatch,
    GenerateRequest,
    Heartbeat,
    HeartbeatRequest,
    LoadProgress,
    ProcessLost,
    RequestError,
    TextItem,
    TextOut,
    ToHttp,
)
from moeserve.messages.steps import ExpertUse, WorkerReady
from moeserve.processes.tracing import Tracer

log = logging.getLogger(__name__)


MAX_CONSTRAINT_BYTES: Final = 256 << 20  # of the grammars of all requests under way


class Health(TypedDict):
    """`stage` and `fraction` while the model is loaded, `cause` while the engine is restarted or does not respond."""

    status: Status
    stage: NotRequired[str]
    fraction: NotRequired[float]
    cause: NotRequired[str]


@dataclass
class EngineClient:
    """This process's end of the connection to the engine. `run` must be running for anything to happen."""

    to_router: AsyncPushChannel
    inbox: AsyncPullChannel[ToHttp]
    metrics: Metrics
    tracer: Tracer | None = None
    continue_requests: bool = True  # where a process is lost; False: what has begun ends with an error
    request_timeout: float | None = None
    first_id: int = 1  # of the requests: an httpserver before this one had those below
    heartbeat: Callable[[], None] = lambda: None  # called when the launcher asks for one
    ready: WorkerReady | None = None
    text_ready: bool = False  # the tokenizer is built; written by `server.py`
    leaving: bool = False  # not ready any more; written by `server.py`
    draining: bool = False  # no new requests; written by `server.py`
    lost: str | None = None  # why there is no router or worker at the moment, once there was one
    lost_detokenizer: str | None = None  # the same
    silences: Silences = field(default_factory=Silences)  # its `watch` must be running, too
    progress: LoadProgress = field(default_factory=lambda: LoadProgress("starting", 0, 0))
    room: QueueRoom = field(default_factory=QueueRoom)  # in the router's queue

    def __post_init__(self) -> None:
        self._ids = itertools.count(self.first_id)
        self._open: dict[int, RunningGeneration] = {}
        # Of the open generations' grammars, in each of which the worker keeps a place.
        self._constraint_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._aborts: set[asyncio.Task[None]] = set()
        self._totals = LoadTotals()
        self.expert_use = ExpertUseFeed(self.to_router)
        self.adapters = ServedAdapters(self.to_router, self.next_id)

    # ------------------------------------------------------------ state

    @property
    def status(self) -> Status:
        if self.leaving or self.draining:
            return "draining"
        if self.ready is None or not self.text_ready:
            return "loading"
        if self.silences.longest is not None:
            return "unresponsive"
        return "ok" if self.lost is None and self.lost_detokenizer is None else "restarting"

    @property
    def is_lost(self) -> bool:
        """There is nothing to serve with, unless the launcher replaces what is lost."""
        return self.status not in ("ok", "draining")

    def health(self) -> Health:
        health: Health = {"status": self.status}
        if health["status"] == "restarting":
            health["cause"] = self.lost or self.lost_detokenizer or ""
        if health["status"] == "unresponsive":
            health["cause"] = f"the {self.silences.longest} says nothing"
        if health["status"] in ("loading", "restarting"):
            only_text = self.ready is not None and self.lost is None
            health["stage"] = "tokenizer" if only_text else self.progress.stage
            total = self.progress.total
            health["fraction"] = 1.0 if only_text else (self.progress.done / total if total else 0.0)
        return health

    def require_ready(self) -> WorkerReady:
        """Returns the engine's limits. Raises ApiError 503 unless a request can be queued. While the engine is
        restarted, it can: it waits for the next worker."""
        if self.status == "unresponsive":
            raise ApiError(503, "the engine does not respond", code="unresponsive")
        if self.draining:
            raise shutting_down()
        if self.ready is None or not self.text_ready:
            health = self.health()
            message = f"the model is loading: {health['stage']}, {health['fraction']:.0%}"
            raise ApiError(503, message, code="loading", refusal=Refusal.LOADING)
        return self.ready

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt plus answer that can run, in tokens: the model's limit, or the KV pool if it is
        smaller."""
        return None if self.ready is None else min(self.ready.max_model_len, self.ready.num_kv_slots)

    # ------------------------------------------------------------ requests

    def start(self, requests: Sequence[GenerateRequest], operation: Operation = "chat") -> GenerationStream:
        """Use it as `async with engine.start(requests) as stream`. The requests' ids are from `next_id`."""
        return GenerationStream(self, requests, operation)

    async def complete(
        self, requests: Sequence[GenerateRequest], operation: Operation = "chat"
    ) -> list[list[TextItem]]:
        """Returns all items of each request. Raises ApiError."""
        answers: list[list[TextItem]] = [[] for _ in requests]
        async with self.start(requests, operation) as stream:
            async for index, item in stream:
                answers[index].append(item)
        return answers

    def serves_others(self, key_name: str) -> bool:
        """Whether requests of another API key are under way."""
        return any(generation.request.key_name != key_name for generation in self._open.values())

    def next_id(self) -> int:
        return next(self._ids)

    async def submit(self, stream: GenerationStream, requests: Sequence[GenerateRequest]) -> None:
        """All of a stream."""
        self.require_ready()
        size = sum(len(request.sampling.grammar) for request in requests)
        if size and self._constraint_bytes + size > MAX_CONSTRAINT_BYTES:
            raise ApiError(
                503,
                "the grammars of the requests under way take too much memory",
                code="overloaded",
                refusal=Refusal.MEMORY,
            )
        self._constraint_bytes += size
        for index, request in enumerate(requests):
            self._open[request.id] = RunningGeneration(index, stream, request)
            stream.open.add(request.id)
            self.room.joined(request)
        self._idle.clear()
        turns.admit()
        try:
            await self._send(requests)
        except ChannelFull as error:
            raise ApiError(503, "the engine takes no requests at the moment", code="overloaded") from error

    async def _send(self, requests: Sequence[GenerateRequest]) -> None:
        """Those of one stream, which have one grammar, if any. Raises ChannelFull."""
        for batch in batches_of(requests):
            still_open = [request for request in batch if request.id in self._open]
            if len(still_open) > 1:
                await self.to_router.send(GenerateBatch.of(still_open))
            elif still_open:
                await self.to_router.send(still_open[0])

    def abort(self, stream: GenerationStream) -> None:
        """Aborts what still runs of a stream, without waiting: the caller may be a cancelled task."""
        for request_id in list(stream.open):
            self._cut_short(request_id, "abort")
            self.metrics.finished("abort")
            task = asyncio.create_task(self._send_abort(request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, request_id: int) -> None:
        try:
            await self.to_router.send(Abort(request_id))
        except ChannelFull as error:
            log.error("abort of request %d: %s", request_id, error)  # the router is stuck

    def _close(self, request_id: int) -> RunningGeneration | None:
        generation = self._open.pop(request_id, None)
        if generation is not None:
            self.room.left(generation.request)
            self._constraint_bytes -= len(generation.request.sampling.grammar)
            generation.stream.open.discard(request_id)
        if not self._open:
            self._idle.set()
        return generation

    def _cut_short(self, request_id: int, reason: FinishReason) -> RunningGeneration | None:
        """Closes a generation that will not get its last message, and records its usage so far."""
        generation = self._close(request_id)
        if generation is not None:
            generation.stream.record.ended(reason, generation.usage_so_far())
        return generation

    async def drain(self, timeout: float) -> None:
        """Waits for the running requests. Those that still run after `timeout` seconds end with a 503."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d requests did not finish in %g s and end with an error", len(self._open), timeout)
            self._fail_all(shutting_down())

    async def flush(self) -> None:
        """Waits until all aborts are sent."""
        if self._aborts:
            await asyncio.wait(self._aborts)

    # ------------------------------------------------------------ messages

    async def run(self) -> None:
        """Reads the inbox until it is cancelled."""
        while True:
            message = await self.inbox.recv()
            if isinstance(message, ProcessLost):
                await self._process_lost(message)
            else:
                self._dispatch(message)

    def _dispatch(self, message: ToHttp) -> None:
        """All but ProcessLost."""
        match message:
            case TextOut(items=items):
                for item in items:
                    self._text(item)
            case RequestError():
                self._failed(message)
            case LoadReport():
                self.metrics.reported.load = self._totals.of(message)
                self.silences.heard("router")
            case Heartbeat():
                self.silences.heard("detokenizer")
                self.lost_detokenizer = None
            case ExpertUse():
                self.expert_use.received(message)
            case LoadProgress():
                self.progress = message
            case EngineReady(ready=ready, adapters=adapters):
                self.ready, self.lost = ready, None
                self.metrics.reported.start_seconds = ready.start_seconds
                if self.first_id > 1:  # the detokenizer has been there for an httpserver before this one
                    self.silences.expect("detokenizer")
                self._adapters_told(adapters)
            case AdaptersServed(adapters=adapters):
                self._adapters_told(adapters)
            case AdapterAnswer():
                self.adapters.received(message)
            case HeartbeatRequest():
                self.heartbeat()
            case EngineLost(cause=cause):
                self._engine_lost(cause)

    def _adapters_told(self, adapters: list[ServedAdapter]) -> None:
        self.adapters.told(adapters)
        self.metrics.reported.adapters = adapters

    def _text(self, item: TextItem) -> None:
        generation = self._open.get(item.id)
        if generation is None:
            return  # its client has disconnected, and the router had not read our Abort yet
        now = time.monotonic()
        arrival = generation.request.arrival
        if item.token_ids:
            self.metrics.tokens(len(item.token_ids), now, arrival, generation.last_token_at)
            generation.stream.record.token(now)
        generation.received(item, now)
        if item.finish_reason is not None:
            self._close(item.id)
            generation.stream.record.ended(item.finish_reason, item.usage or generation.usage_so_far())
            self.metrics.finished(item.finish_reason, item.usage, now - arrival)
            if item.usage is None:
                generation.stream.put(ApiError(500, f"the request ended with {item.finish_reason}"))
                return
        generation.stream.put((generation.index, item))

    def _failed(self, error: RequestError) -> None:
        if error.retry_after is not None:
            self.room.refused(error.retry_after)
        code = "engine_error" if error.retry_after is None else "overloaded"
        failure = ApiError(
            error.status, error.message, code=code, retry_after=error.retry_after, refusal=error.refusal
        )
        self._fail(error.id, failure)

    def _fail(self, request_id: int, error: ApiError) -> None:
        generation = self._cut_short(request_id, "error")
        if generation is None:
            return  # as in _text
        generation.stream.record.error = error.message
        self.metrics.finished("error")
        generation.stream.put(error)

    def _fail_all(self, error: ApiError) -> None:
        for request_id in list(self._open):
            self._fail(request_id, error)

    # ------------------------------------------------------------ losses

    def _engine_lost(self, cause: str) -> None:
        self.lost = cause
        self.progress = LoadProgress("starting", 0, 0)
        self.expert_use.failed(ApiError(503, f"the engine is restarted: {cause}", code="restarting"))

    async def _process_lost(self, lost: ProcessLost) -> None:
        """Raises ChannelFull."""
        cause = f"the {lost.process} was lost: {lost.cause}"
        self.silences.lost(lost.process)
        if lost.process == "router":
            self.to_router.reopen()
            self._totals.start_again()
            self._engine_lost(cause)
            self.adapters.failed(cause)
        else:
            self.lost_detokenizer = cause
        for request_id in self._not_to_resume(lost):
            self._fail(request_id, ApiError(500, f"the engine crashed: {cause}", code="engine_error"))
            if lost.process != "router":
                await self.to_router.send(Abort(request_id))
        self._totals.lost(sum(generation.has_begun for generation in self._open.values()))
        for stream in dict.fromkeys(generation.stream for generation in self._open.values()):
            await self._resume(stream, router_knows=lost.process != "router")

    def _not_to_resume(self, lost: ProcessLost) -> list[int]:
        """Which open generations end: all that have begun, where nothing is to be continued; and those that may be what
        crashes the process, because they were open at two crashes and got no token in between."""
        ending = []
        for request_id, generation in self._open.items():
            is_suspect = lost.by_itself and generation.crashed_at == len(generation.output)
            if is_suspect or (generation.has_begun and not self.continue_requests):
                ending.append(request_id)
            elif lost.by_itself:
                generation.crashed_at = len(generation.output)
        return ending

    async def _resume(self, stream: GenerationStream, *, router_knows: bool) -> None:
        """Sends what a stream still awaits again, under other ids. Raises ChannelFull."""
        for batch in batches_of([self._open[request_id].request for request_id in sorted(stream.open)]):
            again: list[GenerateRequest] = []
            for old in batch:
                generation = self._open.pop(old.id, None)
                if generation is None:
                    continue  # its client has disconnected meanwhile
                again.append(generation.resumed(self.next_id()))
                self._open[again[-1].id] = generation
                stream.open.remove(old.id)
                stream.open.add(again[-1].id)
                if router_knows:
                    await self.to_router.send(Abort(old.id))
            await self._send(again)
