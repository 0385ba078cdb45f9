"""The processes of one server by name: started, listened to, and forgotten when another takes a name over."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import zmq

from moeserve.launcher.child_process import Child, Fork, ServerProcess, memory_of
from moeserve.launcher.zygote import client
from moeserve.processes.lifecycle import FIRST_REQUEST_ENV, LISTEN_WHEN_READY_ENV
from moeserve.processes.listeners import Listeners
from moeserve.processes.runtime_paths import RuntimePaths

HTTPSERVER: Final = "httpserver"
ROUTER: Final = "router"
DETOKENIZER: Final = "detokenizer"
WORKER: Final = "worker"
PROCESSES: Final = (HTTPSERVER, ROUTER, DETOKENIZER, WORKER)
LINK: Final = "moeserve.remote"  # the module in the worker's place where it is on another machine
FORKED: Final = (ROUTER, DETOKENIZER)  # from the zygote, where there is one
KEEPER: Final = "weights"  # the process that a worker is forked from, where there is one


class ProcessTable:
    """The poller has what wakes the launcher when one of them ends or speaks."""

    def __init__(
        self,
        package: str,
        paths: RuntimePaths,
        poller: zmq.Poller,
        listeners: Listeners = Listeners(()),  # noqa: B008
        modules: Mapping[str, str] | None = None,
    ) -> None:
        """The processes are the modules of `package`: `python -m moeserve.router` and so on, but for those that
        `modules` has by name. httpserver inherits `listeners`."""
        self.listens_when_ready = False  # the next httpserver
        self.first_request_id = 1  # of the next httpserver
        self._package = package
        self._modules = modules or {}
        self._paths = paths
        self._poller = poller
        self._listeners = listeners
        self._processes: dict[str, ServerProcess] = {}
        self._zygote = client.Zygote(f"{package}.{client.MODULE}", paths, poller)
        self._waiting: list[str] = []  # to be started as soon as the zygote is ready, or has died

    def __getitem__(self, name: str) -> ServerProcess:
        return self._processes[name]

    def __len__(self) -> int:
        return len(self._processes)

    def all(self) -> list[ServerProcess]:
        return list(self._processes.values())

    @property
    def keeper(self) -> ServerProcess | None:
        return self._processes.get(KEEPER)

    def child(self, name: str) -> Child | None:
        """A process that this one has started itself; None while there is none."""
        process = self._processes.get(name)
        return process if isinstance(process, Child) else None

    def dead(self) -> list[ServerProcess]:
        return [process for process in self.all() if not process.alive]

    def is_alive(self, name: str) -> bool:
        return name in self._processes and self._processes[name].alive

    def start_all(self) -> None:
        """Those of one server. What is forked follows when the zygote is ready, which the worker takes longer for."""
        self._zygote.start()
        for name in PROCESSES:
            if name in FORKED:
                self._waiting.append(name)
            else:
                self.start(name)

    def start(self, name: str) -> None:
        child = self._zygote.fork(name) if name in FORKED else None
        if child is None:
            child = self._spawn(name)
        self._processes[name] = child
        self._poller.register(child.descriptor, zmq.POLLIN)
        if child.line is not None:
            self._poller.register(child.line.fileno(), zmq.POLLIN)

    def _spawn(self, name: str) -> Child:
        module = self._modules.get(name, f"{self._package}.{name}")
        if name == HTTPSERVER:
            variables = self._listeners.environment() | {FIRST_REQUEST_ENV: str(self.first_request_id)}
            variables |= {LISTEN_WHEN_READY_ENV: "1"} if self.listens_when_ready else {}
            descriptors = self._listeners.descriptors()
            return Child.spawn(name, module, self._paths, variables=variables, descriptors=descriptors)
        return Child.spawn(name, module, self._paths, has_line=name == WORKER)

    def replace(self, name: str) -> None:
        """Starts it again; what is left of the last one is killed."""
        self._processes[name].kill()
        self._forget(self._processes[name])
        self.start(name)

    def replace_worker(self) -> None:
        """Has the process with the weights fork another one; where there is none, starts one that loads the model."""
        keeper = self.child(KEEPER)
        if keeper is not None and keeper.alive and keeper.line is not None:
            self._processes[WORKER].begin(0)  # until it says which
            keeper.line.sendall(b"again\n")
            return
        if keeper is not None:
            self._forget(keeper)
        self.replace(WORKER)

    def _forget(self, process: ServerProcess) -> None:
        """One that has ended."""
        del self._processes[process.name]
        if isinstance(process, Child):
            lines = [] if process.line is None else [process.line.fileno()]
            for descriptor in (process.descriptor, *lines):
                with suppress(KeyError):  # `woken_by` may have unregistered it
                    self._poller.unregister(descriptor)
        process.close()

    def woken_by(self, descriptors: dict[object, int]) -> None:
        """Takes in what the poller has found. Each end of a process wakes once."""
        self._zygote.woken_by(descriptors)
        if not self._zygote.is_starting:
            while self._waiting:
                self.start(self._waiting.pop(0))
        for child in [process for process in self.all() if isinstance(process, Child)]:
            if child.line is not None and child.line.fileno() in descriptors:
                self._hear(child, child.line)
            if child.descriptor in descriptors:
                self._poller.unregister(child.descriptor)  # it stays readable for ever

    def _hear(self, keeper: Child, line: socket.socket) -> None:
        """What the process with the weights says of the worker that it has forked: see `worker/loading/keeper.py`."""
        said = line.recv(4096).decode()
        if not said:
            self._poller.unregister(line.fileno())
        for words in map(str.split, said.splitlines()):
            worker = self._processes[WORKER]
            if words[0] == "started" and isinstance(worker, Fork):
                worker.begin(int(words[1]))
            elif words[0] == "started":
                keeper.name = KEEPER
                self._processes |= {WORKER: Fork(WORKER, int(words[1])), KEEPER: keeper}
            elif isinstance(worker, Fork):
                worker.ended = int(words[2])

    def want_no_other_worker(self) -> None:
        """The process with the weights then ends with its worker."""
        keeper = self.child(KEEPER)
        if keeper is not None and keeper.line is not None:
            keeper.line.shutdown(socket.SHUT_WR)

    def kill_all(self) -> None:
        self._waiting.clear()
        self._zygote.close()
        for process in self.all():
            process.kill()
        for process in self.all():
            self._forget(process)

    def memory_used(self) -> int:
        """Bytes of this process and these; shared pages, as of a mapped model, count once (PSS)."""
        pids = [os.getpid(), *self._zygote.pids, *(process.pid for process in self.all())]
        return sum(map(memory_of, pids))
