"""The router's event loop: passes messages from the inbox to `core.Scheduler`, and sends its plans and messages.

Single-threaded. It sleeps in one poll over the inbox and the worker's connection, and uses no CPU while idle.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import zmq

from moeserve.messages.adapters import AdaptersReport, LoadAdapter, UnloadAdapter
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.schema import (
    Abort,
    EngineLost,
    EngineReady,
    EngineReadyRequest,
    ExpertUseRequest,
    GenerateBatch,
    GenerateRequest,
    HeartbeatRequest,
    HttpserverLost,
    RequestError,
    Shutdown,
    StopHit,
    ToRouter,
    WorkerExited,
)
from moeserve.messages.steps import ExpertUse, StepResult, WorkerReady
from moeserve.messages.worker import WorkerAnswer, WorkerClient, WorkerDied
from moeserve.processes.silence import LauncherWatch
from moeserve.processes.tower_page import TowerPage
from moeserve.router.adapter_registry import LOOK_S, AdapterRegistry
from moeserve.router.core.scheduler import Scheduler
from moeserve.router.core.steps.plans_in_flight import ProtocolError
from moeserve.router.embedding_links import EmbeddingLinks
from moeserve.router.kv_event_publisher import KvEventPublisher
from moeserve.router.replacement import WorkerSource
from moeserve.router.request_tracer import RequestTracer
from moeserve.router.worker_deadline import StepDeadline

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.05
HEARTBEAT_S = 1.0  # interval between reports while nothing changes
CONNECT_INTERVAL_S = 0.02  # interval between attempts to connect to the next worker
IDLE_PING_S = 15.0  # interval between pings of an idle worker
PING_MS = 1.0
MESSAGES_PER_TURN = 256  # limit per turn, so that a burst of requests does not delay the worker's next plan


class RouterManager:
    """Owns the scheduler. Sends messages about requests to the detokenizer; sends load reports, expert use and the
    worker's state to httpserver.

    A lost worker (its process ended, its answers are invalid, or a step's deadline passed) is replaced. The requests
    that it was computing then continue from their tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: WorkerClient,
        inbox: PullChannel[ToRouter],
        detokenizer: PushChannel,
        http: PushChannel,
        workers: WorkerSource,
        request_tracer: RequestTracer | None = None,
        kv_events: KvEventPublisher | None = None,
        *,
        step_timeout: float | None = None,
        continue_requests: bool = True,
        adapters: AdapterRegistry | None = None,
        heartbeat: Callable[[], None] = lambda: None,
        launcher: LauncherWatch | None = None,
        idle_ping: float = IDLE_PING_S,
        spans: EmbeddingLinks | None = None,
        tower: TowerPage | None = None,
    ) -> None:
        """worker: the first worker; workers: the source of later ones. step_timeout: seconds, see StepDeadline.
        continue_requests: if False, requests that a lost worker was computing fail instead of continuing. heartbeat:
        called when the launcher asks for a heartbeat. idle_ping: seconds between requests to an idle worker. adapters:
        None if LoRA adapters cannot be added and removed. spans: None if requests have no embeddings. tower: None if
        the model has no vision tower."""
        self._scheduler = scheduler
        self._request_tracer = request_tracer
        self._kv_events = kv_events
        self._worker: WorkerClient | None = worker  # None after it was lost, until the next one is ready
        self._workers = workers
        self._first = worker.ready()
        self._adapters = AdapterRegistry(self._first, {}) if adapters is None else adapters
        self._continue_requests = continue_requests
        self._heartbeat = heartbeat
        self._launcher = launcher
        self._spans = spans
        self._tower = tower
        self._idle_ping = idle_ping
        self._heard_at = time.monotonic()  # when the worker last answered or was connected
        self._deadline = StepDeadline(step_timeout, self._first.disk_wait_s)
        self._exit: WorkerExited | None = None  # of the lost worker, once the launcher reported it
        self._crashed_by_itself = False  # a worker has crashed since the last one was ready
        self._first_id = 0  # first request id of the current httpserver
        self._inbox = inbox
        self._detokenizer = detokenizer
        self._http = http
        self._poller = zmq.Poller()
        self._poller.register(inbox.socket, zmq.POLLIN)
        self._worker_fd = worker.fileno()  # kept because a broken connection has none
        self._poller.register(self._worker_fd, zmq.POLLIN)
        self._awaits_expert_use = False  # requested from the worker but not answered yet
        self._stopping = False
        self._was_idle = True
        self._report: LoadReport | None = None  # last report sent
        self._report_at = 0.0  # time of the last check whether a report is due
        self._sent_at = 0.0
        self._report_is_due = False  # something may have changed since the last report

    def run(self, early: Sequence[ToRouter] = ()) -> None:
        """Serves until Shutdown, then ends the worker. early: messages that arrived before the worker was ready.
        Raises ChannelFull if httpserver or the detokenizer stops reading, RuntimeError if a new worker has smaller
        limits than the first."""
        for message in early:
            self._receive(message)
        wait_ms = 0
        while not self._stopping:
            self._poller.poll(wait_ms)
            self.turn()
            wait_ms = self._wait_ms()
        self._scheduler.close("the server is shutting down")
        self._flush()
        worker = self._worker or self._workers.connect()  # the next worker may just have become ready
        if worker is not None:
            worker.shutdown()

    def turn(self) -> None:
        """Does all work that needs no waiting: handles messages, sends plans to the worker, then sends messages."""
        for message in self._inbox.drain(MESSAGES_PER_TURN):
            self._receive(message)
        if self._worker is None:
            self._find_worker()
        if self._worker is not None:
            if self._tower is not None:
                self._scheduler.beside_tower(*self._tower.encoding)
            try:
                self._serve(self._worker)
            except (WorkerDied, ProtocolError) as error:
                self._lose_worker(self._worker, str(error))
        if self._tower is not None:
            self._tower.open_requests = self._scheduler.num_open
        if self._launcher is not None:
            self._launcher.look(is_needed=self._worker is None)
        self._flush()
        self._report_load(time.monotonic())

    def _receive(self, message: ToRouter) -> None:
        match message:
            case GenerateRequest(id=id) if id < self._first_id:
                log.debug("request %d, whose httpserver was lost", id)
            case GenerateRequest(adapter=key) if key and not self._adapters.has(key):
                gone = "the adapter has been unloaded meanwhile"
                self._detokenizer.send(RequestError(message.id, 404, gone))
            case GenerateRequest():
                self._add(message)
            case GenerateBatch():
                for request in message.unpacked():
                    self._receive(request)
            case Abort(id=id):
                self._scheduler.abort(id)
            case ExpertUseRequest():
                self._ask_expert_use()
            case EngineReadyRequest():
                self._tell_of_engine()
            case LoadAdapter():
                self._adapters.load(message)
            case UnloadAdapter():
                self._adapters.unload(message)
            case StopHit():
                self._scheduler.stop_hit(message)
            case WorkerExited():
                self._worker_exited(message)
            case HttpserverLost(first_id=first_id):
                self._first_id = first_id
                self._scheduler.abort_before(first_id)
            case HeartbeatRequest():
                self._heartbeat()
            case Shutdown():
                self._stopping = True

    def _add(self, message: GenerateRequest) -> None:
        if message.spans and self._spans is not None and self._scheduler.limits.refusal(message) is None:
            linked = self._spans.linked(message)
            if isinstance(linked, RequestError):
                self._detokenizer.send(linked)
                return
            message = linked
        if self._request_tracer is not None:
            self._request_tracer.received(message)
        self._scheduler.add(message)

    def _tell_of_engine(self) -> None:
        self._http.send(EngineReady(ready=self._first, adapters=self._adapters.served))
        if self._worker is None:
            self._http.send(
                EngineLost(cause="the worker was lost" if self._exit is None else self._exit.cause)
            )

    def _serve(self, worker: WorkerClient) -> None:
        """Exchanges plans and results with the worker. Raises WorkerDied and ProtocolError."""
        try:
            answers: Sequence[WorkerAnswer] = worker.poll()
        except WorkerDied as error:
            self._accept(error.answers)
            raise
        self._accept(answers)
        now = time.monotonic()
        wanted = self._adapters.due(now, self._scheduler.adapters_in_use)
        if wanted is not None:
            worker.request_adapters(wanted)
        while not self._adapters.is_restoring and (plan := self._scheduler.plan(now)) is not None:
            worker.submit(plan)
            now = time.monotonic()
        awaited = self._scheduler.step_awaited
        if awaited is None and now - self._heard_at >= self._idle_ping:
            self._ask_expert_use()
            awaited = -1, PING_MS
        self._deadline.watch(awaited, now)
        if self._deadline.due is not None and now >= self._deadline.due:
            raise WorkerDied("the worker does not answer")

    def _accept(self, answers: Sequence[WorkerAnswer]) -> None:
        if answers:
            self._heard_at = time.monotonic()
        for answer in answers:
            match answer:
                case ExpertUse():
                    self._awaits_expert_use = False
                    self._http.try_send(answer)  # dropped if httpserver is too busy; the client asks again
                case AdaptersReport():
                    self._adapters.report(answer)
                    for key, cause in self._adapters.take_failed():
                        self._scheduler.adapter_lost(key, cause)
                case StepResult():
                    self._scheduler.step_result(answer, time.monotonic())

    def _ask_expert_use(self) -> None:
        """Requests the experts' use; overlapping requests share one answer. If the worker is lost there is no report,
        and httpserver gets EngineLost."""
        if self._worker is not None and not self._awaits_expert_use:
            self._awaits_expert_use = True
            self._worker.request_expert_use()

    def _lose_worker(self, worker: WorkerClient, cause: str) -> None:
        """Asks for a new worker; requests wait until it is ready."""
        scheduler = self._scheduler
        log.error("%s, %s; %d requests are open", cause, scheduler.in_flight_shape, scheduler.num_open)
        self._worker = None
        self._awaits_expert_use = False
        self._deadline.watch(None, 0.0)
        self._poller.unregister(self._worker_fd)
        worker.close()
        self._adapters.worker_lost(cause)
        scheduler.worker_lost(cause, go_on=self._continue_requests)
        self._workers.replace(worker.pid, cause)
        self._http.send(EngineLost(cause=cause if self._exit is None else self._exit.cause))

    def _worker_exited(self, exited: WorkerExited) -> None:
        """Handles the launcher's report, which may come before or after the connection breaks."""
        self._exit = exited
        self._crashed_by_itself |= exited.by_itself
        if self._worker is None:
            self._http.send(EngineLost(cause=exited.cause))  # this cause names the signal

    def _find_worker(self) -> None:
        """Connects to the next worker if it is ready."""
        worker = self._workers.connect()
        if worker is None:
            return
        try:
            ready = worker.ready()
        except WorkerDied as error:
            worker.close()
            self._workers.replace(worker.pid, str(error))
            return
        if not _has_as_much(ready, self._first):
            raise RuntimeError(
                "the new worker has fewer slots than the first, or another number of KV pools: "
                f"{ready}, not {self._first}; give both the same memory and --kv-window-ratio"
            )
        self._worker = worker
        self._adapters.worker_found(ready)
        self._heard_at = time.monotonic()
        self._worker_fd = worker.fileno()
        self._poller.register(self._worker_fd, zmq.POLLIN)
        cause = "the worker was lost" if self._exit is None else self._exit.cause
        self._scheduler.worker_ready(cause, crashed_by_itself=self._crashed_by_itself)
        self._exit, self._crashed_by_itself = None, False
        self._http.send(EngineReady(ready=self._first, adapters=self._adapters.served))

    def _flush(self) -> None:
        for message in self._scheduler.take_messages():
            self._detokenizer.send(message)
            if self._request_tracer is not None:
                self._request_tracer.sent(message)
        handles = self._scheduler.take_handles()
        if self._spans is not None:
            self._spans.remove(handles)
        for told in self._adapters.take_messages():
            self._http.send(told)
        if self._kv_events is not None:
            self._kv_events.publish(self._scheduler.take_kv_events())

    def _report_load(self, now: float) -> None:
        """Sends a LoadReport if something changed: at most every REPORT_INTERVAL_S, but at once when the last
        request ends, so that metrics read then show its slots as free. A report that the full channel refuses is
        sent again later."""
        idle = self._scheduler.is_idle
        self._report_is_due = True
        if idle or now - self._report_at >= REPORT_INTERVAL_S:
            report = self._scheduler.load_report()
            is_news = report != self._report or now - self._sent_at >= HEARTBEAT_S
            self._report_at = now
            self._report_is_due = is_news and not self._http.try_send(report)
            if is_news and not self._report_is_due:
                self._sent_at = now
            if not self._report_is_due:
                self._report = report
        if idle and not self._was_idle:
            self._scheduler.check()
        self._was_idle = idle

    def _wait_ms(self) -> int:
        """Returns the milliseconds that the poll may sleep if no message arrives."""
        if self._worker is not None and self._worker.has_read_ahead:
            return 0
        now = time.monotonic()
        due = self._report_at + REPORT_INTERVAL_S if self._report_is_due else self._sent_at + HEARTBEAT_S
        if self._worker is None:
            due = min(due, now + CONNECT_INTERVAL_S)
        elif self._deadline.due is not None:
            due = min(due, self._deadline.due)
        if self._adapters.is_busy:
            due = min(due, now + LOOK_S)
        return max(math.ceil((due - now) * 1e3), 0)


def _has_as_much(ready: WorkerReady, first: WorkerReady) -> bool:
    """Returns whether a worker's sizes are at least the first worker's, on which the scheduler's limits are based."""
    is_same = ready.vocab_size == first.vocab_size and ready.adapters == first.adapters
    is_same = is_same and (ready.num_window_slots > 0) == (first.num_window_slots > 0)
    is_same = is_same and ready.embedding_size == first.embedding_size
    is_same = is_same and ready.whole_spans == first.whole_spans
    return is_same and all(
        getattr(ready, name) >= getattr(first, name)
        for name in (
            "num_kv_slots",
            "num_state_slots",
            "num_window_slots",
            "max_num_seqs",
            "max_model_len",
            "max_num_batched_tokens",
        )
    )
