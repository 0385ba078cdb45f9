"""The worker's contract: what executes step plans, and how a router reaches it.

`Worker` states what the calls mean. The model's runners, the simulator's virtual worker and a worker process that is
driven one call at a time implement it. `WorkerClient` is the same contract for an event loop: requests are sent without
waiting, and answers are collected when they are there, so that the plan of step N+1 lies ready while step N runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from moeserve.messages.adapters import AdaptersReport, AdapterState, AdaptersWanted
from moeserve.messages.steps import ExpertUse, StepPlan, StepResult, WorkerReady

WorkerAnswer = StepResult | ExpertUse | AdaptersReport


@runtime_checkable
class Worker(Protocol):
    """Executes step plans: a model, its KV pool and its sampling state.

    Order: calls are executed one at a time, in the order in which they are made. The router relies on it when it hands
    out KV slots that a row of an earlier plan may still write to.

    Mutation: `step` executes the plan's state copies, overwrites the request slots of its new sequences, writes the KV
    slots of its rows, advances the recurrent state of their sequences and appends each sampled token to its sequence.
    In each layer, the KV of all rows is written before any row attends. It changes nothing else, and never the plan.

    Errors: plans come from the router and are not validated. Any exception that `step` or `expert_use` raises is fatal
    to the worker, because its KV pool may be half written: no call may follow. What concerns one request alone, such as
    non-finite logits, is not an exception but a `Sampled` with token id -1.
    """

    @abstractmethod
    def ready(self) -> WorkerReady:
        """Returns the worker's limits: slots, sequences and tokens of a step. The same at every call."""
        ...

    @abstractmethod
    def step(self, plan: StepPlan) -> StepResult:
        """Executes a plan and waits for its result; its times are in milliseconds."""
        ...

    @abstractmethod
    def expert_use(self) -> ExpertUse:
        """Tokens routed to each expert in the steps so far, and where each expert's weights are."""
        ...

    def adapters(self, wanted: AdaptersWanted) -> AdaptersReport:
        """Unloads the LoRA adapters that are not wanted, which no row of a later plan has; begins to read missing ones,
        if it has not begun; and returns which are there. Does not wait for any. A bad adapter is its own error. A
        worker without adapters never gets this call."""
        return AdaptersReport(
            [AdapterState(source.order, error="not supported") for source in wanted.sources]
        )

    @property
    def runs_ahead(self) -> bool:
        """Whether it may launch a plan before it has the result of the one before, so that its device does not wait for
        the host: then it is an OverlappingWorker."""
        return False

    def warm_on(self, *, is_idle: bool) -> bool:
        """Between two calls: a worker in the place of one that was lost does a piece of what it has put off because
        answers wait. is_idle: no call waits now. False when nothing is left."""
        return False


class OverlappingWorker(Worker, Protocol):
    """A worker that `runs_ahead`. `step` is `start` and then `finish`; between those there is no call but the ones
    here."""

    @abstractmethod
    def start(self, plan: StepPlan) -> None:
        """Launches a plan that has rows. None is under way."""
        ...

    @property
    @abstractmethod
    def is_under_way(self) -> bool:
        """A plan has been launched whose result has not been read."""
        ...

    @property
    @abstractmethod
    def is_computed(self) -> bool:
        """True if `finish` would return without waiting."""
        ...

    @abstractmethod
    def may_follow(self, plan: StepPlan) -> bool:
        """Returns whether `advance` takes this plan."""
        ...

    @abstractmethod
    def advance(self, plan: StepPlan) -> StepResult:
        """Launches a plan behind the one under way, waits for the result of that one and returns it. A plan that
        depends on that result is launched when it is there, before it is returned. The plan is then the one under way;
        `launch_rest` is the next call."""
        ...

    @abstractmethod
    def launch_rest(self) -> None:
        """Launches what `advance` has left of its plan, which may have to wait for something on the host."""
        ...

    @abstractmethod
    def finish(self) -> StepResult:
        """Waits for the plan under way."""
        ...


class WorkerDied(Exception):
    """The worker process has ended or answers something meaningless; the message names the cause. `answers` arrived
    before, and count."""

    def __init__(self, cause: str, answers: Sequence[WorkerAnswer] = ()) -> None:
        super().__init__(cause)
        self.answers = answers


class WorkerClient(Protocol):
    """A worker as an event loop sees it: `submit` and the `request_` calls send, `poll` collects the answers.

    Order: each call gets one answer, and answers arrive in the order of the calls. Execution order, mutation and errors
    are those of the `Worker`; an exception of it arrives as WorkerDied, after which only `close` may be called.
    """

    @abstractmethod
    def ready(self) -> WorkerReady:
        """`Worker.ready`; waits for it. Called first. Raises WorkerDied."""
        ...

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Has the worker execute a plan, without waiting. If the worker has died, the next `poll` raises, after it has
        read the worker's own account of the cause."""
        ...

    @abstractmethod
    def request_expert_use(self) -> None:
        """Has the worker answer with an ExpertUse after the plans submitted so far, without waiting."""
        ...

    @abstractmethod
    def request_adapters(self, wanted: AdaptersWanted) -> None:
        """Has the worker answer with `Worker.adapters` after the plans submitted so far, without waiting."""
        ...

    @abstractmethod
    def poll(self) -> list[WorkerAnswer]:
        """The answers that have arrived since the last call, without waiting. Raises WorkerDied."""
        ...

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process that executes the plans."""
        ...

    @abstractmethod
    def fileno(self) -> int:
        """A file descriptor that is readable when `poll` may return something. The same at every call."""
        ...

    @property
    @abstractmethod
    def has_read_ahead(self) -> bool:
        """`poll` may return something although `fileno` is not readable."""
        ...

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the worker, waiting for it a bounded time, and closes. A worker that has died already is no error."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Closes the connection. A worker process that is alive waits for another router after its current step."""
        ...
