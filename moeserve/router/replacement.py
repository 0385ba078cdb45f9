"""The way to another worker when one is lost: the launcher ends what is left of it and starts the next, which is
connected to as soon as it has loaded the model."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Protocol

from moeserve.messages.channels import PushChannel
from moeserve.messages.schema import ReplaceWorker
from moeserve.messages.worker import WorkerClient
from moeserve.router.worker_client import RpycWorker


class WorkerSource(Protocol):
    """Where a router gets its next worker from."""

    @abstractmethod
    def replace(self, pid: int, cause: str) -> None:
        """Has this worker's process ended, and another started."""
        ...

    @abstractmethod
    def connect(self) -> WorkerClient | None:
        """The next worker, or None while there is none. Does not wait."""
        ...


class LaunchedWorkers(WorkerSource):
    """Worker processes of the launcher; each listens at `path` when it is ready."""

    def __init__(self, path: Path, launcher: PushChannel) -> None:
        self._path = path
        self._launcher = launcher
        self._given_up: int | None = None  # it may listen again until the launcher has ended it

    def replace(self, pid: int, cause: str) -> None:
        self._given_up = pid
        self._launcher.send(ReplaceWorker(pid=pid, cause=cause))

    def connect(self) -> RpycWorker | None:
        try:
            worker = RpycWorker(self._path)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        if worker.pid != self._given_up:
            return worker
        worker.close()
        return None


class LinkedWorkers(LaunchedWorkers):
    """A worker on another machine, behind the link process, which finds the next one by itself. The launcher is asked
    for another link only where this one does not answer."""

    def __init__(self, path: Path, launcher: PushChannel) -> None:
        super().__init__(path, launcher)
        self._client: RpycWorker | None = None  # the last one

    def replace(self, pid: int, cause: str) -> None:
        if self._client is None or not self._client.has_ended:
            super().replace(pid, cause)

    def connect(self) -> RpycWorker | None:
        worker = super().connect()
        if worker is not None:
            self._client = worker
        return worker
