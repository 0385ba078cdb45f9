"""The router's event loop: it feeds `core.Scheduler` from the inbox, and sends its plans and messages.

One thread. It sleeps in one poll over the inbox and the connection to the worker, and uses no CPU while idle.
"""

from __future__ import annotations

import logging
import math
import time

import zmq

from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.schema import (
    Abort,
    EngineDead,
    ExpertUse,
    ExpertUseRequest,
    GenerateRequest,
    LoadReport,
    Shutdown,
    StopHit,
    ToRouter,
)
from moeserve.messages.worker import WorkerClient, WorkerDied
from moeserve.router.core.scheduler import ProtocolError, Scheduler
from moeserve.router.request_tracer import RequestTracer

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.05
MESSAGES_PER_TURN = 256  # bounded, so that a burst of requests does not delay the worker's next plan


class RouterManager:
    """Owns the scheduler. Sends messages about requests to the detokenizer, and load reports, expert use and EngineDead
    to httpserver."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: WorkerClient,
        inbox: PullChannel[ToRouter],
        detokenizer: PushChannel,
        http: PushChannel,
        request_tracer: RequestTracer | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._request_tracer = request_tracer
        self._worker: WorkerClient | None = worker  # None: it has died
        self._inbox = inbox
        self._detokenizer = detokenizer
        self._http = http
        self._poller = zmq.Poller()
        self._poller.register(inbox.socket, zmq.POLLIN)
        self._poller.register(worker.fileno(), zmq.POLLIN)
        self._worker_fd = worker.fileno()
        self._awaits_expert_use = False  # requested from the worker and not answered yet
        self._stopping = False
        self._was_idle = True
        self._report: LoadReport | None = None  # the last one sent
        self._report_at = 0.0
        self._report_is_due = False  # something may have changed since

    def run(self) -> None:
        """Serves until Shutdown, then ends the worker. Raises ChannelFull when httpserver or the detokenizer takes no
        messages."""
        wait_ms: int | None = 0
        while not self._stopping:
            self._poller.poll(wait_ms)
            self.turn()
            wait_ms = self._wait_ms()
        self._scheduler.close("the server is shutting down")
        self._flush()
        if self._worker is not None:
            self._worker.shutdown()

    def turn(self) -> None:
        """Does what can be done now, without waiting: messages in, plans to the worker, then messages out."""
        for message in self._inbox.drain(MESSAGES_PER_TURN):
            self._receive(message)
        if self._worker is not None:
            try:
                self._serve(self._worker)
            except (WorkerDied, ProtocolError) as error:
                self._lose_worker(self._worker, str(error))
        self._flush()
        self._report_load(time.monotonic())

    def _receive(self, message: ToRouter) -> None:
        match message:
            case GenerateRequest():
                if self._request_tracer is not None:
                    self._request_tracer.received(message)
                self._scheduler.add(message)
            case Abort(id=id):
                self._scheduler.abort(id)
            case ExpertUseRequest():
                self._ask_expert_use()
            case StopHit():
                self._scheduler.stop_hit(message)
            case Shutdown():
                self._stopping = True

    def _serve(self, worker: WorkerClient) -> None:
        for answer in worker.poll():
            if isinstance(answer, ExpertUse):
                self._awaits_expert_use = False
                self._http.try_send(answer)  # dropped when httpserver is too busy: the client asks again
            else:
                self._scheduler.step_result(answer, time.monotonic())
        while (plan := self._scheduler.plan(time.monotonic())) is not None:
            worker.submit(plan)

    def _ask_expert_use(self) -> None:
        """Requests that overlap get one answer together. A dead worker gives none; httpserver has EngineDead then."""
        if self._worker is not None and not self._awaits_expert_use:
            self._awaits_expert_use = True
            self._worker.request_expert_use()

    def _lose_worker(self, worker: WorkerClient, cause: str) -> None:
        """Fails every open request; the scheduler refuses later ones until Shutdown."""
        log.error("%s", cause)
        self._worker = None
        self._poller.unregister(self._worker_fd)
        worker.close()
        self._scheduler.close(cause)
        self._http.send(EngineDead(cause=cause))

    def _flush(self) -> None:
        for message in self._scheduler.take_messages():
            self._detokenizer.send(message)
            if self._request_tracer is not None:
                self._request_tracer.sent(message)

    def _report_load(self, now: float) -> None:
        """Sends a LoadReport when something has changed: at most every REPORT_INTERVAL_S, but at once when the last
        request ends, so that metrics read then show its slots as free. A report that the full channel refuses is sent
        again later."""
        idle = self._scheduler.is_idle
        self._report_is_due = True
        if idle or now - self._report_at >= REPORT_INTERVAL_S:
            report = self._scheduler.load_report()
            self._report_at = now
            self._report_is_due = report != self._report and not self._http.try_send(report)
            if not self._report_is_due:
                self._report = report
        if idle and not self._was_idle:
            self._scheduler.check()
        self._was_idle = idle

    def _wait_ms(self) -> int | None:
        """Milliseconds that the poll may sleep: until a report is due; None: until a message arrives."""
        if self._worker is not None and self._worker.has_read_ahead:
            return 0
        if not self._report_is_due:
            return None
        due_in = self._report_at + REPORT_INTERVAL_S - time.monotonic()
        return max(math.ceil(due_in * 1e3), 0)
