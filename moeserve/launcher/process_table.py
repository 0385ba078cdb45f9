"""The processes of one server by name: started, listened to, and forgotten when another takes a name over."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Container, Mapping
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
VISUALSERVER: Final = "visualserver"
PROCESSES: Final = (HTTPSERVER, ROUTER, DETOKENIZER, WORKER)  # of every server
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
        *,
        has_tower: bool = False,
    ) -> None:
        """The processes are the modules of `package`: `python -m moeserve.router` and so on, but for those that
        `modules` has by name. httpserver inherits `listeners`. has_tower: there is a visual server."""
        self.names = (*PROCESSES, VISUALSERVER) if has_tower else PROCESSES
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
        """Starts the processes of one server. Forks follow when the zygote is ready, for which the worker's loading
        leaves time."""
        self._zygote.start()
        for name in self.names:
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
            self._begin_fork(0)  # until it says which
            keeper.line.sendall(b"again\n")
            keeper.go_on()
            return
        if keeper is not None:
            self._forget(keeper)
        self.replace(WORKER)

    def _forget(self, process: ServerProcess) -> None:
        """One that has ended."""
        del self._processes[process.name]
        self._unregister(process)
        process.close()

    def _unregister(self, process: ServerProcess) -> None:
        """Unregisters the sockets by which the process wakes the launcher; `woken_by` may have unregistered some of
        them."""
        assert isinstance(process, Child | Fork)
        line = process.line if isinstance(process, Child) else None
        for descriptor in (process.descriptor, None if line is None else line.fileno()):
            with suppress(KeyError):
                self._poller.unregister(descriptor)

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
        worker, keeper = self._processes.get(WORKER), self.keeper
        if isinstance(worker, Fork) and worker.descriptor in descriptors and keeper is not None:
            self._poller.unregister(worker.descriptor)
            keeper.go_on()  # it has something to say

    def _hear(self, keeper: Child, line: socket.socket) -> None:
        """What the process with the weights says of the worker that it has forked: see `worker/loading/keeper.py`."""
        said = line.recv(4096).decode()
        if not said:
            self._poller.unregister(line.fileno())
        for words in map(str.split, said.splitlines()):
            worker = self._processes[WORKER]
            if words[0] == "started":
                if not isinstance(worker, Fork):
                    keeper.name = KEEPER
                    self._processes |= {WORKER: Fork(WORKER, 0), KEEPER: keeper}
                self._begin_fork(int(words[1]))
            elif isinstance(worker, Fork):
                worker.ended = int(words[2])

    def _begin_fork(self, pid: int) -> None:
        """pid 0: it is not known yet."""
        worker = self._processes[WORKER]
        assert isinstance(worker, Fork)
        self._unregister(worker)
        worker.begin(pid)
        if worker.descriptor is not None:
            self._poller.register(worker.descriptor, zmq.POLLIN)

    def end_with_keeper(self, worker: Fork) -> None:
        """Notes the end of a worker that the kernel has killed, because its keeper died: that one said nothing of
        it."""
        keeper = self.keeper
        if worker.alive and keeper is not None and not keeper.alive:
            worker.ended = -signal.SIGKILL
            worker.given_up, worker.was_stopped = keeper.given_up, keeper.was_stopped

    def owing(self, ready: Container[str]) -> list[ServerProcess]:
        """The processes that must do something. They start, and are not in `ready`; or one is the process with the
        weights, which has to say what has become of its worker, or to fork another."""
        keeper, worker = self.keeper, self._processes.get(WORKER)
        awaited = keeper is not None and isinstance(worker, Fork) and worker.awaits_keeper
        starting = [
            process
            for process in self.all()
            if process.alive and process.name not in ready and process is not keeper
        ]
        if awaited:
            assert keeper is not None
            starting = [keeper, *(process for process in starting if process is not worker)]
        return [*starting, *self._zygote.processes(is_starting=True)]

    def never_stopped(self, ready: Container[str]) -> list[ServerProcess]:
        """The processes that may be idle for long, and are not asked for a heartbeat."""
        worker = [self._processes[WORKER]] if WORKER in ready and self.is_alive(WORKER) else []
        return [*worker, *self._zygote.processes(is_starting=False)]

    def worker_is_left(self, ready: Container[str]) -> bool:
        """Its router was lost, and it does not listen for the next: it still computes a step. (A link listens only
        while it is connected.)"""
        is_ours = WORKER in ready and WORKER not in self._modules and self.is_alive(WORKER)
        return (
            is_ours and ROUTER in self._processes and ROUTER not in ready and not self._paths.worker.exists()
        )

    def go_on(self) -> None:
        """Continues all stopped processes."""
        for process in self.all():
            process.go_on()

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
        pids = [process.pid for process in (*self._zygote.processes(), *self.all())]
        return sum(map(memory_of, [os.getpid(), *pids]))
