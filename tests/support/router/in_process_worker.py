"""A worker in the router's process, executed by `poll`: for tests that need no second process."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial

from moeserve.messages.adapters import AdaptersWanted
from moeserve.messages.steps import StepPlan, WorkerReady
from moeserve.messages.worker import Worker, WorkerAnswer, WorkerClient, WorkerDied


class InProcessWorker(WorkerClient):
    has_read_ahead = False
    pid = os.getpid()

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._calls: deque[Callable[[], WorkerAnswer]] = deque()
        # Counts the calls that are not executed yet, so that `fileno` is readable while there are any.
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)

    def ready(self) -> WorkerReady:
        return self._worker.ready()

    def submit(self, plan: StepPlan) -> None:
        self._call(partial(self._worker.step, plan))

    def request_expert_use(self) -> None:
        self._call(self._worker.expert_use)

    def request_adapters(self, wanted: AdaptersWanted) -> None:
        self._call(partial(self._worker.adapters, wanted))

    def _call(self, call: Callable[[], WorkerAnswer]) -> None:
        self._calls.append(call)
        os.eventfd_write(self._signal, 1)

    def poll(self) -> list[WorkerAnswer]:
        """Executes the oldest call, and only one, so that other events are handled between two steps."""
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
