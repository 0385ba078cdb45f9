"""The interface of workers, which execute step plans, and of the router's client for them.

`Worker` defines the calls. The model's runners and the simulator's virtual worker implement it, as does a client that
drives a worker process one call at a time. `WorkerClient` is the same interface for an event loop: it sends calls
without waiting, and collects answers when they arrive. So the plan of step N+1 is ready while step N runs.
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
    """Executes step plans. Owns a model, its KV pool and its sampling state.

    Order: calls are executed one at a time, in the order in which they are made. The router relies on it when it hands
    out KV slots that a row of an earlier plan may still write to.

    Mutation: `step` executes the plan's state copies, overwrites the request slots of its new sequences, writes the KV
    slots of its rows, advances the recurrent state of their sequences and appends each sampled token to its sequence.
    In each layer, the KV of all rows is written before any row attends. It changes nothing else, in particular not the
    plan.

    Errors: plans come from the router and are not validated. Any exception that `step` or `expert_use` raises is fatal
    to the worker, because its KV pool may be half written: no call may follow. A failure of a single request, such as
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
        """Returns the tokens routed to each expert so far, and where each expert's weights are."""
        ...

    def adapters(self, wanted: AdaptersWanted) -> AdaptersReport:
        """Unloads LoRA adapters that are not wanted (no later plan uses them), starts to read missing ones, and returns
        the state of each. Does not wait. An adapter that cannot be read only gets an error in its state. A worker
        without adapters never gets this call."""
        return AdaptersReport(
            [AdapterState(source.order, error="not supported") for source in wanted.sources]
        )

    @property
    def runs_ahead(self) -> bool:
        """True if it can launch a plan before it has the previous plan's result, so that its device does not wait for
        the host. It is then an OverlappingWorker."""
        return False

    def warm_on(self, *, is_idle: bool) -> bool:
        """Does a piece of the warm-up that a replacement worker has postponed, because answers wait for it. Called
        between two calls. is_idle: no call is waiting. Returns False when nothing is left to do."""
        return False


class OverlappingWorker(Worker, Protocol):
    """A worker that `runs_ahead`. `step` is `start` followed by `finish`; between the two, only the methods declared
    here may be called."""

    @abstractmethod
    def start(self, plan: StepPlan) -> None:
        """Launches a plan that has rows. Call it only if no plan is in progress."""
        ...

    @property
    @abstractmethod
    def is_under_way(self) -> bool:
        """True if a plan was launched whose result has not been read."""
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
        """Launches a plan after the running one, then waits for the running plan's result and returns it. If the new
        plan depends on that result, it is launched when the result is known, before it is returned. The new plan is
        then the running one; call `launch_rest` next."""
        ...

    @abstractmethod
    def launch_rest(self) -> None:
        """Launches the rest of the plan that `advance` has begun, which may wait for work on the host."""
        ...

    @abstractmethod
    def finish(self) -> StepResult:
        """Waits for the running plan, and returns its result."""
        ...


class WorkerDied(Exception):
    """The worker process has ended, or its answer was malformed; the message names the cause. `answers` arrived before
    that and are valid."""

    def __init__(self, cause: str, answers: Sequence[WorkerAnswer] = ()) -> None:
        super().__init__(cause)
        self.answers = answers


class WorkerClient(Protocol):
    """A worker's client for an event loop: `submit` and the `request_` methods send, `poll` collects the answers.

    Order: each call gets one answer, in the order of the calls. For execution order, mutation and errors see `Worker`.
    An exception of the worker arrives as WorkerDied; after it, only `close` may be called.
    """

    @abstractmethod
    def ready(self) -> WorkerReady:
        """Waits for `Worker.ready` and returns it. The first call. Raises WorkerDied."""
        ...

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Sends a plan for execution, without waiting. If the worker has died, the next `poll` raises, with the cause
        that the worker stated."""
        ...

    @abstractmethod
    def request_expert_use(self) -> None:
        """Asks for an ExpertUse after the plans submitted so far, without waiting."""
        ...

    @abstractmethod
    def request_adapters(self, wanted: AdaptersWanted) -> None:
        """Asks for `Worker.adapters` after the plans submitted so far, without waiting."""
        ...

    @abstractmethod
    def poll(self) -> list[WorkerAnswer]:
        """Returns the answers that have arrived since the last call, without waiting. Raises WorkerDied."""
        ...

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process id of the worker that executes the plans."""
        ...

    @abstractmethod
    def fileno(self) -> int:
        """Returns a file descriptor that is readable when `poll` may return answers; always the same one."""
        ...

    @property
    @abstractmethod
    def has_read_ahead(self) -> bool:
        """True if `poll` may return answers although `fileno` is not readable."""
        ...

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the worker, waits for it (for a limited time), and closes the connection. It is no error if the worker
        is already dead."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Closes the connection. A worker process that still lives finishes its step, then waits for another router."""
        ...
