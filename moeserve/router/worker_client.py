"""The router's end of the line to the worker: the same few calls over rpyc or within the process.

Submitting never waits for the step; `poll` returns what has been answered. `fileno` becomes readable when
there may be something, so that one poller waits for the worker and for the sockets.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import rpyc
from rpyc.core.service import VoidService

from moeserve.messages import codec, rpc
from moeserve.messages.schema import ExpertUse, StepPlan, StepResult, WorkerError, WorkerReady

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 30.0
SHUTDOWN_TIMEOUT_S = 5.0


class WorkerDied(Exception):
    """The worker is gone or of no use; the message names the cause."""


class Worker(Protocol):
    def hello(self) -> WorkerReady:
        """What the router may use. Called once, first. Raises WorkerDied."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Sends a plan; plans are executed in the order of the calls. That the worker is gone shows in `poll`,
        which may still find its last words."""
        ...

    def ask_expert_use(self) -> None:
        """Has an ExpertUse come through `poll`, after the steps submitted so far."""
        ...

    def poll(self) -> list[StepResult | ExpertUse]:
        """The answers that are there, in the order of what was asked, without waiting. Raises WorkerDied."""
        ...

    def fileno(self) -> int:
        """Readable when `poll` may have something."""
        ...

    @property
    def has_read_ahead(self) -> bool:
        """`poll` may have something though `fileno` is not readable."""
        ...

    def shutdown(self) -> None:
        """Ends the worker and closes the line. A worker that is dead already is no error."""
        ...

    def close(self) -> None:
        """Hangs up; a worker that still lives ends after its step."""
        ...


class RpycWorker:
    """A worker process, reached through its Unix socket."""

    def __init__(self, path: Path) -> None:
        """Raises OSError while nobody listens at `path`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(os.fspath(path))
        except OSError:
            sock.close()
            raise
        self._stream = rpc.DuplexStream(sock)
        self._connection = rpc.connection(VoidService(), self._stream)
        self._answers: deque[Any] = deque()  # AsyncResults ready, in order
        self._step: Any = None  # the worker's methods, asynchronous; see hello
        self._expert_use: Any = None
        self._shutdown: Any = None

    def hello(self) -> WorkerReady:
        try:
            root = self._connection.root
            # Kept, because rpyc asks the other side again each time a method is looked up.
            self._step = rpyc.async_(root.step)
            self._expert_use = rpyc.async_(root.expert_use)
            self._shutdown = rpyc.async_(root.shutdown)
            hello = rpyc.async_(root.hello)
            answer = hello()
            answer.set_expiry(HELLO_TIMEOUT_S)
            ready = codec.FROM_WORKER.decode(answer.value)
        except (EOFError, TimeoutError) as error:
            raise WorkerDied(f"the worker did not answer hello: {error}") from error
        if not isinstance(ready, WorkerReady):
            raise WorkerDied(f"the worker answered hello with {type(ready).__name__}")
        return ready

    def submit(self, plan: StepPlan) -> None:
        try:
            self._step(codec.encode(plan)).add_callback(self._answers.append)
        except EOFError as error:
            log.debug("plan %d was not sent: %s", plan.step, error)  # poll finds out why

    def ask_expert_use(self) -> None:
        try:
            self._expert_use().add_callback(self._answers.append)
        except EOFError as error:
            log.debug("the experts' use was not asked for: %s", error)  # as above

    def poll(self) -> list[StepResult | ExpertUse]:
        try:
            while self._connection.poll(0):
                pass
        except EOFError as error:
            # Results that came just before the end go with it, since every open request fails anyway; but
            # the worker's own account of what went wrong is a better cause than ours.
            self._take()
            raise WorkerDied(f"the worker process has gone ({error})") from error
        return self._take()

    def _take(self) -> list[StepResult | ExpertUse]:
        results: list[StepResult | ExpertUse] = []
        while self._answers:
            message = codec.FROM_WORKER.decode(self._answers.popleft().value)
            if isinstance(message, WorkerError):
                raise WorkerDied(f"the worker failed: {message.message}")
            if not isinstance(message, StepResult | ExpertUse):
                raise WorkerDied(f"the worker answered with {type(message).__name__}")
            results.append(message)
        return results

    def fileno(self) -> int:
        return int(self._connection.fileno())

    @property
    def has_read_ahead(self) -> bool:
        return self._stream.has_read_ahead

    def shutdown(self) -> None:
        try:
            answer = self._shutdown()
            answer.set_expiry(SHUTDOWN_TIMEOUT_S)
            answer.wait()
        except (EOFError, TimeoutError) as error:
            # Dead already, or deep in a step: the end of the line ends it after that.
            log.debug("the worker did not answer shutdown: %s", error)
        self.close()

    def close(self) -> None:
        self._stream.close()


class Runner(Protocol):
    """What executes plans; the model's runner, or a test's."""

    def ready(self) -> WorkerReady: ...

    def step(self, plan: StepPlan) -> StepResult: ...

    def expert_use(self) -> ExpertUse: ...


class InProcessWorker:
    """A runner in this process: `poll` computes. For tests and benchmarks, which want no second process."""

    has_read_ahead = False

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._calls: deque[Callable[[], StepResult | ExpertUse]] = deque()
        # Counts the calls not executed yet, so that `fileno` is readable while there are some.
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)

    def hello(self) -> WorkerReady:
        return self._runner.ready()

    def submit(self, plan: StepPlan) -> None:
        self._call(partial(self._runner.step, plan))

    def ask_expert_use(self) -> None:
        self._call(self._runner.expert_use)

    def _call(self, call: Callable[[], StepResult | ExpertUse]) -> None:
        self._calls.append(call)
        os.eventfd_write(self._signal, 1)

    def poll(self) -> list[StepResult | ExpertUse]:
        """Executes the oldest call: one, so that other events get their turn between two steps."""
        if not self._calls:
            return []
        os.eventfd_read(self._signal)
        try:
            return [self._calls.popleft()()]
        except Exception as error:
            raise WorkerDied(f"the worker failed: {type(error).__name__}: {error}") from error

    def fileno(self) -> int:
        return self._signal

    def shutdown(self) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._signal)
