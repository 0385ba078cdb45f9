"""The router's connection to the worker process. `messages/worker.py` specifies the calls."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections import deque
from pathlib import Path
from typing import Any, TypeVar

import rpyc
from rpyc.core.service import VoidService

from moeserve.messages import codec, rpc
from moeserve.messages.adapters import AdaptersReport, AdaptersWanted
from moeserve.messages.steps import ExpertUse, StepPlan, StepResult, WorkerError, WorkerReady
from moeserve.messages.worker import Worker, WorkerAnswer, WorkerClient, WorkerDied

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 5.0

Expected = TypeVar("Expected", StepResult, ExpertUse, AdaptersReport)


class RpycWorker(Worker, WorkerClient):
    """A client of the worker process, over its Unix socket.

    The router uses `submit` and `poll`. `step`, `expert_use` and `adapters` block until their answer arrives; they
    are for callers that execute one plan at a time, and must not be called while submitted calls are unanswered.
    """

    def __init__(self, path: Path) -> None:
        """Connects. Raises OSError if no worker listens at `path`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(os.fspath(path))
        except OSError:
            sock.close()
            raise
        self._pid = peer_pid(sock)
        self._stream = rpc.DuplexStream(sock)
        self._connection = rpc.connection(VoidService(), self._stream)
        self._answers: deque[Any] = deque()  # finished AsyncResults, in order
        self._ready: WorkerReady | None = None
        self._remote_step: Any = None  # the worker's methods, asynchronous; set by `ready`
        self._remote_expert_use: Any = None
        self._remote_adapters: Any = None
        self._remote_shutdown: Any = None
        self.has_ended = False  # the worker closed the connection

    def ready(self) -> WorkerReady:
        if self._ready is None:
            self._ready = self._hello()
        return self._ready

    def _hello(self) -> WorkerReady:
        try:
            root = self._connection.root
            # Kept, because rpyc asks the other side at each method look-up.
            self._remote_step = rpyc.async_(root.step)
            self._remote_expert_use = rpyc.async_(root.expert_use)
            self._remote_adapters = rpyc.async_(root.adapters)
            self._remote_shutdown = rpyc.async_(root.shutdown)
            hello = rpyc.async_(root.hello)
            answer = hello()
            answer.set_expiry(HELLO_TIMEOUT_S)
            ready = codec.FROM_WORKER.decode(answer.value)
        except (EOFError, TimeoutError) as error:
            self.has_ended = isinstance(error, EOFError)
            raise WorkerDied(f"the worker did not answer hello: {error}") from error
        if not isinstance(ready, WorkerReady):
            raise WorkerDied(f"the worker answered hello with {type(ready).__name__}")
        return ready

    def submit(self, plan: StepPlan) -> None:
        try:
            self._remote_step(codec.encode(plan)).add_callback(self._answers.append)
        except EOFError as error:
            log.debug("plan %d was not sent: %s", plan.step, error)  # `poll` reports the cause

    def request_expert_use(self) -> None:
        try:
            self._remote_expert_use().add_callback(self._answers.append)
        except EOFError as error:
            log.debug("the experts' use was not requested: %s", error)  # as above

    def request_adapters(self, wanted: AdaptersWanted) -> None:
        try:
            self._remote_adapters(codec.encode(wanted)).add_callback(self._answers.append)
        except EOFError as error:
            log.debug("no adapters were requested: %s", error)  # as above

    def step(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self._wait_for(StepResult)

    def expert_use(self) -> ExpertUse:
        self.request_expert_use()
        return self._wait_for(ExpertUse)

    def adapters(self, wanted: AdaptersWanted) -> AdaptersReport:
        self.request_adapters(wanted)
        return self._wait_for(AdaptersReport)

    def _wait_for(self, kind: type[Expected]) -> Expected:
        while not (answers := self.poll()):
            self._stream.poll(None)
        if len(answers) != 1 or not isinstance(answers[0], kind):
            raise WorkerDied(f"the worker answered with {answers}, not one {kind.__name__}")
        return answers[0]

    def poll(self) -> list[WorkerAnswer]:
        try:
            while self._connection.poll(0):
                pass
        except EOFError as error:
            self.has_ended = True
            # A WorkerError among the last answers describes the cause better than the lost connection.
            raise WorkerDied(f"the worker process has gone ({error})", self._take_answers()) from error
        return self._take_answers()

    def _take_answers(self) -> list[WorkerAnswer]:
        results: list[WorkerAnswer] = []
        while self._answers:
            try:
                message = codec.FROM_WORKER.decode(self._answers.popleft().value)
            except Exception as error:
                raise WorkerDied(f"the worker answered with an error: {error}", results) from error
            if isinstance(message, WorkerError):
                raise WorkerDied(f"the worker failed: {message.message}", results)
            if not isinstance(message, WorkerAnswer):
                raise WorkerDied(f"the worker answered with {type(message).__name__}", results)
            results.append(message)
        return results

    @property
    def pid(self) -> int:
        return self._pid

    def fileno(self) -> int:
        return int(self._connection.fileno())

    @property
    def has_read_ahead(self) -> bool:
        return self._stream.has_read_ahead

    def shutdown(self) -> None:
        try:
            answer = self._remote_shutdown()
            answer.set_expiry(SHUTDOWN_TIMEOUT_S)
            answer.wait()
        except (EOFError, TimeoutError) as error:
            # It has died, or is in a long step, after which the closed connection ends it.
            log.debug("the worker did not answer shutdown: %s", error)
        self.close()

    def close(self) -> None:
        self._stream.close()


def peer_pid(sock: socket.socket) -> int:
    """Returns the process id at the other end of a Unix socket (unix(7), SO_PEERCRED)."""
    pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid
