"""Obtains a new worker when one is lost: the launcher ends the old process and starts another, to which the router
connects once it has loaded the model."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Protocol

from moeserve.messages.channels import PushChannel
from moeserve.messages.schema import ReplaceWorker
from moeserve.messages.worker import WorkerClient
from moeserve.router.worker_client import RpycWorker


class WorkerSource(Protocol):
    """Supplies a router's next workers."""

    @abstractmethod
    def replace(self, pid: int, cause: str) -> None:
        """Has the worker process `pid` ended and another one started."""
        ...

    @abstractmethod
    def connect(self) -> WorkerClient | None:
        """Connects to the next worker. Returns None if it is not ready; does not wait."""
        ...


class LaunchedWorkers(WorkerSource):
    """Worker processes started by the launcher; each listens at `path` when ready."""

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
    """A worker on another machine behind the link process, which finds the next worker by itself. The launcher
    starts another link only if this one does not answer."""

    def __init__(self, path: Path, launcher: PushChannel) -> None:
        super().__init__(path, launcher)
        self._client: RpycWorker | None = None  # the last client

    def replace(self, pid: int, cause: str) -> None:
        if self._client is None or not self._client.has_ended:
            super().replace(pid, cause)

    def connect(self) -> RpycWorker | None:
        worker = super().connect()
        if worker is not None:
            self._client = worker
        return worker
