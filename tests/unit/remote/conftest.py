"""Certificates as the how-to makes them, a second authority's, and a gate that runs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from moeserve import __version__
from moeserve.messages.steps import WorkerReady
from moeserve.remote.frames import Welcome
from moeserve.remote.gate import Gate, NotServing, WorkerDoor
from moeserve.remote.tls import gate_context
from moeserve.remote.tls_files import TlsFiles
from tests.support.servers.worker_host import make_certificates

READY = WorkerReady(256, 4, 128, 1000, 1, 2, "none")
FINGERPRINT = "the model's"


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="session")
def strangers_certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same names, signed by another authority."""
    return make_certificates(tmp_path_factory.mktemp("strangers"))


def files(folder: Path, name: str) -> TlsFiles:
    return TlsFiles(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / "ca.pem"))


class RunningGate:
    """A gate in a thread. Behind its door, `workers` gets the worker's end of each line; or `connect` is called."""

    def __init__(self, certificates: Path, connect: Callable[[], socket.socket] | None = None) -> None:
        self.workers: list[socket.socket] = []
        self.refusal = ""  # why there is no worker
        self.refusals = 0  # that were told
        self.fingerprint = FINGERPRINT
        self.version = __version__
        self._connect = connect or self._pair
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._poller = zmq.Poller()
        door: WorkerDoor = self._open
        self.gate = Gate(
            self._listener, gate_context(files(certificates, "worker"), "--ssl-"), self._poller, door
        )
        self._orders: list[Callable[[], None]] = []
        self._stops = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def order(self, call: Callable[[], None]) -> None:
        """Has the gate's thread make a call."""
        self._orders.append(call)

    def close(self) -> None:
        self._stops = True
        self._thread.join()
        self.gate.close()
        for sock in (self._listener, *self.workers):
            sock.close()

    def _run(self) -> None:
        while not self._stops:
            wait = min(self.gate.due - time.monotonic(), 0.02)  # so that orders are seen
            self._poller.poll(max(int(wait * 1e3), 0))
            while self._orders:
                self._orders.pop()()
            self.gate.turn()

    def _open(self) -> tuple[Welcome, socket.socket]:
        if self.refusal:
            self.refusals += 1
            raise NotServing(self.refusal)
        try:
            return Welcome(self.version, self.fingerprint, READY), self._connect()
        except OSError as error:
            raise NotServing(f"no worker: {error}") from error

    def _pair(self) -> socket.socket:
        ours, workers = socket.socketpair()
        self.workers.append(workers)
        return ours


@pytest.fixture
def gate(certificates: Path) -> Iterator[RunningGate]:
    running = RunningGate(certificates)
    yield running
    running.close()
