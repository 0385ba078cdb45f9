"""The server in virtual time: clients, httpserver, the router's loop around the real scheduler, the worker.

The router does what `router.manager` does, at the times at which it would: on each arrival and each result it feeds the
scheduler, then plans until there is nothing to plan or two plans are in flight. So plan N+1 is made while the worker
runs N, and a request that arrives while both are in flight waits for them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moeserve.cli.simulate.clients import Clients
from moeserve.cli.simulate.step_time import StepTime
from moeserve.cli.simulate.tiers import TierModel
from moeserve.cli.simulate.worker import Timing, VirtualWorker
from moeserve.cli.workload.metrics import Outcome
from moeserve.cli.workload.trace import Workload
from moeserve.messages.pages import Tier
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.schema import GenerateRequest, RequestError, TokensOut
from moeserve.messages.steps import StepResult
from moeserve.router.core.limits import Limits
from moeserve.router.core.scheduler import Scheduler

Action = Callable[[float], None]

SHORTEST_S = 1e-6  # the duration of a run in which every request was refused at once
# The order of events at the same time: the router reads its inbox before the worker's results.
_ARRIVAL, _RESULT = 0, 1


@dataclass(slots=True)
class TimeWeightedGauge:
    """A value over virtual time, with its time-weighted mean and its maximum."""

    value: float = 0.0
    most: float = 0.0
    area: float = 0.0
    since: float = 0.0

    def set(self, value: float, now: float) -> None:
        self.area += self.value * (now - self.since)
        self.since = now
        self.value = value
        self.most = max(self.most, value)

    def mean(self, duration: float) -> float:
        return (self.area + self.value * (duration - self.since)) / duration


@dataclass(frozen=True, slots=True)
class SimulationResult:
    outcomes: list[Outcome]
    duration: float  # virtual seconds until the last answer ended
    report: LoadReport  # the scheduler's totals at the end
    running: TimeWeightedGauge
    waiting: TimeWeightedGauge
    kv_slots: TimeWeightedGauge
    worker_busy: float  # seconds spent in steps
    step_tokens: int  # tokens of these steps


@dataclass
class Simulation:
    """One simulated run; `run` may be called once. Deterministic: the same arguments give the same result."""

    workload: Workload
    limits: Limits
    step_time: StepTime
    timing: Timing
    max_concurrency: int | None = None
    max_tokens: int | None = None  # max_tokens of every request; None: the length that its answer will have
    on_end: Callable[[], object] = lambda: None  # called when a request ends
    tiers: Mapping[Tier, TierModel] | None = None  # the same tiers as in `limits`

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, int, Action]] = []
        self._order = itertools.count()
        self._scheduler = Scheduler(self.limits)
        self._clients = Clients(
            self.workload,
            self._at,
            self._send,
            self.max_concurrency,
            self.max_tokens,
            self.on_end,
            self.timing.connect,
        )
        self._worker = VirtualWorker(
            self.limits, self.step_time, self.timing, self._clients.output_lens, self.tiers
        )
        self._scheduler.learn(self._worker.ready().measured_steps)
        self._frontend_free_at = 0.0
        self._running = TimeWeightedGauge()
        self._waiting = TimeWeightedGauge()
        self._kv_slots = TimeWeightedGauge()

    def run(self) -> SimulationResult:
        """Runs the simulation to the end of all requests, and returns its outcome, with times in seconds of virtual
        time. Raises RuntimeError if the scheduler leaves requests without an end, AssertionError if its slot counts are
        wrong."""
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                heapq.heappop(self._events)[3](now)
            self._turn(now)
        if self._clients.num_open or not self._scheduler.is_idle:
            raise RuntimeError(f"the scheduler stands still with {self._clients.num_open} requests open")
        self._scheduler.check()
        outcomes = self._clients.outcomes
        return SimulationResult(
            outcomes=outcomes,
            duration=max([outcome.end for outcome in outcomes], default=0.0) or SHORTEST_S,
            report=self._scheduler.load_report(),
            running=self._running,
            waiting=self._waiting,
            kv_slots=self._kv_slots,
            worker_busy=self._worker.busy,
            step_tokens=self._worker.tokens,
        )

    def _at(self, when: float, action: Action, kind: int = _ARRIVAL) -> None:
        heapq.heappush(self._events, (when, kind, next(self._order), action))

    def _send(self, request: GenerateRequest, now: float) -> None:
        """Passes a request to httpserver, which is one process and handles requests one after another."""
        self._frontend_free_at = max(self._frontend_free_at, now) + self.timing.frontend
        self._at(self._frontend_free_at, lambda now: self._scheduler.add(request))

    def _turn(self, now: float) -> None:
        while (plan := self._scheduler.plan(now)) is not None:
            self._worker.now = now
            result = self._worker.step(plan)
            self._at(self._worker.result_at, self._on_result(result), _RESULT)
        self._deliver(now + self.timing.reply)
        report = self._scheduler.load_report()
        self._running.set(report.num_running, now)
        self._waiting.set(report.num_waiting, now)
        self._kv_slots.set(report.kv_slots_used, now)

    def _on_result(self, result: StepResult) -> Action:
        return lambda now: self._scheduler.step_result(result, now)

    def _deliver(self, when: float) -> None:
        for message in self._scheduler.take_messages():
            if isinstance(message, TokensOut):
                for item in message.items:
                    self._clients.item(item, when)
            elif isinstance(message, RequestError):
                self._clients.error(message, when)
