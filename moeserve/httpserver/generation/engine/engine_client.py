"""EngineClient: sends requests to the router, and puts each answer into the queue of its HTTP request.

One HTTP request is one `Delivery` for one or more generations: one for each choice of each prompt. The delivery's queue
is the only buffer between the engine and the client's socket. The request itself bounds it: a generation yields at most
max_tokens items, and the prompt's log-probabilities if they were asked for. So a client that does not read holds only
its own request's tokens, for at most `sse.SEND_TIMEOUT_S`.

When the router or the detokenizer is lost, every open generation is sent again with its tokens so far, under a new id.
Messages that still arrive for the old id are ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moeserve.httpserver.generation.engine.batches import batches_of
from moeserve.httpserver.generation.engine.delivery import Delivery
from moeserve.httpserver.generation.engine.engine_state import EngineState
from moeserve.httpserver.generation.engine.expert_use import ExpertUseFeed
from moeserve.httpserver.generation.engine.open_generations import OpenGenerations, RunningGeneration
from moeserve.httpserver.generation.engine.picture_client import PictureClient
from moeserve.httpserver.generation.engine.queue_room import QueueRoom
from moeserve.httpserver.generation.engine.served_adapters import ServedAdapters
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.httpserver.transport.errors import ApiError, shutting_down
from moeserve.messages.adapters import AdapterAnswer, AdaptersServed, ServedAdapter
from moeserve.messages.async_channels import AsyncPullChannel, AsyncPushChannel
from moeserve.messages.channels import ChannelFull
from moeserve.messages.pictures import PictureEncoded, PictureRefused
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.sampling import FinishReason
from moeserve.messages.schema import (
    BACKGROUND_PRIORITY,
    Abort,
    EngineLost,
    EngineReady,
    EngineReadyRequest,
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
from moeserve.messages.steps import ExpertUse
from moeserve.processes.tracing import Tracer

log = logging.getLogger(__name__)


@dataclass
class EngineClient:
    """This process's end of the connection to the engine. `run` must be running for anything to happen."""

    to_router: AsyncPushChannel
    inbox: AsyncPullChannel[ToHttp]
    metrics: Metrics
    tracer: Tracer | None = None
    # False: if a process is lost, generations that have begun end with an error.
    continue_requests: bool = True
    request_timeout: float | None = None
    first_id: int = 1  # first request id: lower ids belong to the httpserver process before this one
    heartbeat: Callable[[], None] = lambda: None  # called when the launcher asks for one
    state: EngineState = field(default_factory=EngineState)
    room: QueueRoom = field(default_factory=QueueRoom)  # in the router's queue
    pictures: PictureClient | None = None  # None: the model sees no pictures

    def __post_init__(self) -> None:
        self._ids = itertools.count(self.first_id)
        # The detokenizer may have been lost together with the httpserver process before this one.
        if self._is_a_replacement:
            self.state.lost_detokenizer = "the detokenizer has not been heard since httpserver was replaced"
        self._open = OpenGenerations(self.room)
        self._aborts: set[asyncio.Task[None]] = set()
        self.expert_use = ExpertUseFeed(self.to_router)
        self.adapters = ServedAdapters(self.to_router, self.next_id)

    # ------------------------------------------------------------ requests

    def serves_others(self, key_name: str) -> bool:
        """Returns whether requests of another API key are running or waiting."""
        return any(generation.request.key_name != key_name for generation in self._open)

    @property
    def _is_a_replacement(self) -> bool:
        """True if this process replaces a lost httpserver: the router and the detokenizer then run already."""
        return self.first_id > 1

    def next_id(self) -> int:
        return next(self._ids)

    async def submit(self, requests: Sequence[GenerateRequest], delivery: Delivery) -> None:
        """Sends the generations of one HTTP request; their items go to `delivery`. Raises ApiError 503."""
        self.state.require_ready()
        self._open.add(delivery, requests)
        try:
            await self._send(requests)
        except ChannelFull as error:
            raise ApiError(
                503,
                "the engine takes no requests at the moment; try again in a few seconds",
                code="overloaded",
            ) from error

    async def _send(self, requests: Sequence[GenerateRequest]) -> None:
        """Sends the requests of one HTTP request, which share one grammar, if any. Raises ChannelFull."""
        for batch in batches_of(requests):
            still_open = [request for request in batch if request.id in self._open]
            if len(still_open) > 1:
                await self.to_router.send(GenerateBatch.of(still_open))
            elif still_open:
                await self.to_router.send(still_open[0])

    def abort(self, delivery: Delivery) -> None:
        """Aborts the delivery's running generations, without waiting: the caller may be a cancelled task."""
        for request_id in self._open.ids_of(delivery):
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

    def _cut_short(self, request_id: int, reason: FinishReason) -> RunningGeneration | None:
        """Closes a generation that ends without its final message, and records its usage so far."""
        generation = self._open.close(request_id)
        if generation is not None:
            generation.delivery.record.ended(reason, generation.usage_so_far())
        return generation

    async def drain(self, timeout: float) -> None:
        """Waits for the running requests. After `timeout` seconds the remaining ones end with a 503."""
        try:
            async with asyncio.timeout(timeout):
                await self._open.wait_idle()
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
        """Handles every message except ProcessLost."""
        state = self.state
        match message:
            case TextOut(items=items):
                for item in items:
                    self._text(item)
            case RequestError():
                self._failed(message)
            case LoadReport():
                load = self.metrics.reported.load = self.metrics.totals.of(message)
                state.slow_disk.told(load.expert_disk)
                state.silences.heard("router")
            case Heartbeat():
                state.silences.heard("detokenizer")
                state.lost_detokenizer = None
            case ExpertUse():
                self.expert_use.received(message)
            case LoadProgress():
                state.progress = message
            case EngineReady(ready=ready, adapters=adapters):
                state.ready, state.lost = ready, None
                self.metrics.reported.start_seconds = ready.start_seconds
                if self._is_a_replacement:
                    state.silences.expect("detokenizer")
                self._adapters_told(adapters)
            case AdaptersServed(adapters=adapters):
                self._adapters_told(adapters)
            case AdapterAnswer():
                self.adapters.received(message)
            case PictureEncoded() | PictureRefused():
                assert self.pictures is not None
                self.pictures.received(message)
            case HeartbeatRequest():
                self.heartbeat()
                self.metrics.keep()
            case EngineLost(cause=cause):
                self._engine_lost(cause)

    def _adapters_told(self, adapters: list[ServedAdapter]) -> None:
        self.adapters.told(adapters)
        self.metrics.reported.adapters = adapters

    def _text(self, item: TextItem) -> None:
        generation = self._open.get(item.id)
        if generation is None:
            return  # its client has disconnected; the message was sent before the router read our Abort
        now = time.monotonic()
        arrival, delivery = generation.request.arrival, generation.delivery
        if item.token_ids and generation.request.priority != BACKGROUND_PRIORITY:
            self.metrics.tokens(len(item.token_ids), now, arrival, generation.last_token_at)
        if item.token_ids:
            delivery.record.token(now)
        generation.received(item, now)
        if item.finish_reason is not None:
            self._open.close(item.id)
            delivery.record.ended(item.finish_reason, item.usage or generation.usage_so_far())
            is_background = generation.request.priority == BACKGROUND_PRIORITY
            self.metrics.finished(item.finish_reason, item.usage, None if is_background else now - arrival)
            if item.usage is None:
                delivery.fail(ApiError(500, f"the request ended with {item.finish_reason}"))
                return
        delivery.put(generation.index, item)

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
        generation.delivery.record.error = error.message
        self.metrics.finished("error")
        generation.delivery.fail(error)

    def _fail_all(self, error: ApiError) -> None:
        for generation in list(self._open):
            self._fail(generation.request.id, error)

    # ------------------------------------------------------------ losses

    def _engine_lost(self, cause: str) -> None:
        self.state.lost = cause
        self.state.progress = LoadProgress("starting", 0, 0)
        self.expert_use.failed(ApiError(503, f"the engine is restarted: {cause}", code="restarting"))

    async def _process_lost(self, lost: ProcessLost) -> None:
        """Fails the generations of the lost process, or sends them again. Raises ChannelFull if they cannot be sent."""
        if lost.process == "visualserver":
            assert self.pictures is not None
            await self.pictures.lost(by_itself=lost.by_itself)
            return
        cause = f"the {lost.process} was lost: {lost.cause}"
        self.state.silences.lost(lost.process)
        if lost.process == "router":
            self.to_router.reopen()
            # The new router's EngineReady may have come before this message: senders have no common order.
            await self.to_router.send(EngineReadyRequest())
            self.metrics.totals.start_again()
            self._engine_lost(cause)
            self.adapters.failed(cause)
        else:
            self.state.lost_detokenizer = cause
        for request_id in self._not_to_resume(lost):
            self._fail(request_id, ApiError(500, f"the engine crashed: {cause}", code="engine_error"))
            if lost.process != "router":
                await self.to_router.send(Abort(request_id))
        self.metrics.totals.lost(sum(generation.has_begun for generation in self._open))
        for delivery in self._open.deliveries:
            await self._resume(delivery, router_knows=lost.process != "router")

    def _not_to_resume(self, lost: ProcessLost) -> list[int]:
        """Returns the ids of open generations that must end: without `continue_requests`, all generations that have
        begun; and the generations that may have caused the crash, because they were open at two crashes in a row
        without a token in between."""
        ending = []
        for generation in self._open:
            is_suspect = lost.by_itself and generation.crashed_at == len(generation.output)
            if is_suspect or (generation.has_begun and not self.continue_requests):
                ending.append(generation.request.id)
            elif lost.by_itself:
                generation.crashed_at = len(generation.output)
        return ending

    async def _resume(self, delivery: Delivery, *, router_knows: bool) -> None:
        """Sends the unfinished generations of an HTTP request again, under new ids. Raises ChannelFull."""
        for batch in batches_of(self._open.requests_of(delivery)):
            again: list[GenerateRequest] = []
            for old in batch:
                request = self._open.resumed(old.id, self.next_id())
                if request is None:
                    continue  # its client has disconnected meanwhile
                again.append(request)
                if router_knows:
                    await self.to_router.send(Abort(old.id))
            await self._send(again)
