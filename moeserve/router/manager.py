"""The router's loop: sockets in, `core.Scheduler` in the middle, the worker and the detokenizer out.

One thread. It sleeps in one poll over the inbox and the line to the worker, and does nothing while idle.
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
from moeserve.router.core.scheduler import ProtocolError, Scheduler
from moeserve.router.request_tracer import RequestTracer
from moeserve.router.worker_client import Worker, WorkerDied

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.05
MESSAGES_PER_TURN = 256  # so that a burst of requests does not keep the worker waiting for its next plan


class RouterManager:
    """Owns the scheduler. The detokenizer hears what concerns requests, httpserver the load and the end."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        inbox: PullChannel[ToRouter],
        detokenizer: PushChannel,
        http: PushChannel,
        request_tracer: RequestTracer | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._request_tracer = request_tracer
        self._worker: Worker | None = worker  # None: it died
        self._inbox = inbox
        self._detokenizer = detokenizer
        self._http = http
        self._poller = zmq.Poller()
        self._poller.register(inbox.socket, zmq.POLLIN)
        self._poller.register(worker.fileno(), zmq.POLLIN)
        self._worker_fd = worker.fileno()
        self._asks_expert_use = False  # the worker has been asked and has not answered
        self._stopping = False
        self._was_idle = True
        self._report: LoadReport | None = None  # the last one sent
        self._report_at = 0.0
        self._report_is_due = False  # something may have changed since

    def run(self) -> None:
        """Serves until Shutdown, then ends the worker. Raises ChannelFull when a neighbour is stuck."""
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
        """Everything that can be done now, without waiting: the worker first, then the news of it."""
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

    def _serve(self, worker: Worker) -> None:
        for answer in worker.poll():
            if isinstance(answer, ExpertUse):
                self._asks_expert_use = False
                self._http.try_send(answer)  # dropped when httpserver is too busy: whoever asks, asks again
            else:
                self._scheduler.step_result(answer, time.monotonic())
        while (plan := self._scheduler.plan(time.monotonic())) is not None:
            worker.submit(plan)

    def _ask_expert_use(self) -> None:
        """One answer is enough for all who ask before it comes; a dead worker gives none, and httpserver knows."""
        if self._worker is not None and not self._asks_expert_use:
            self._asks_expert_use = True
            self._worker.ask_expert_use()

    def _lose_worker(self, worker: Worker, cause: str) -> None:
        """Every open request fails; later ones are refused by the scheduler, until we are told to stop."""
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
        """A LoadReport when something changed: every 50 ms at most, but at once when the last request ends,
        so that whoever asks then sees its slots free. A report that finds no room is tried again."""
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
        """How long the poll may sleep: until something comes, or a report that is held back falls due."""
        if self._worker is not None and self._worker.has_read_ahead:
            return 0
        if not self._report_is_due:
            return None
        due_in = self._report_at + REPORT_INTERVAL_S - time.monotonic()
        return max(math.ceil(due_in * 1e3), 0)
