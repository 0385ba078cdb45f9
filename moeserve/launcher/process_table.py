"""The processes of one server by name: starts, polls and replaces them."""

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
# of every server; some have a visual server, too
PROCESSES: Final = (HTTPSERVER, ROUTER, DETOKENIZER, WORKER)
LINK: Final = "moeserve.remote"  # module that takes the worker's place if the worker is on another machine
FORKED: Final = (ROUTER, DETOKENIZER)  # forked from the zygote if it runs
KEEPER: Final = "weights"  # the process that holds the weights and forks workers, where it is used


class ProcessTable:
    """Maps names to processes, and registers with the poller the descriptors that report a process's end or message."""

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
        """Process NAME runs the module `package`.NAME, unless `modules` maps the name to another one. httpserver
        inherits `listeners`. has_tower: the server has a visual server."""
        self.names = (*PROCESSES, VISUALSERVER) if has_tower else PROCESSES
        self.listens_when_ready = False  # passed to the next httpserver
        self.first_request_id = 1  # for the next httpserver
        self._package = package
        self._modules = modules or {}
        self._paths = paths
        self._poller = poller
        self._listeners = listeners
        self._processes: dict[str, ServerProcess] = {}
        self._zygote = client.Zygote(f"{package}.{client.MODULE}", paths, poller)
        self._waiting: list[str] = []  # to be started when the zygote is ready or has died

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
        """Returns a process that the launcher started itself; None if there is none of this name."""
        process = self._processes.get(name)
        return process if isinstance(process, Child) else None

    def dead(self) -> list[ServerProcess]:
        return [process for process in self.all() if not process.alive]

    def is_alive(self, name: str) -> bool:
        return name in self._processes and self._processes[name].alive

    def start_all(self) -> None:
        """Starts all processes of a server. Those forked from the zygote follow when it is ready, while the worker
        loads."""
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
        """Starts a process again, after killing the rest of the old one."""
        self._processes[name].kill()
        self._forget(self._processes[name])
        self.start(name)

    def replace_worker(self) -> None:
        """Gets a new worker: forked by the process that holds the weights or, without one, started to load the
        model."""
        keeper = self.child(KEEPER)
        if keeper is not None and keeper.alive and keeper.line is not None:
            self._begin_fork(0)  # pid 0 until the keeper reports it
            keeper.line.sendall(b"again\n")
            keeper.go_on()
            return
        if keeper is not None:
            self._forget(keeper)
        self.replace(WORKER)

    def _forget(self, process: ServerProcess) -> None:
        """Forgets a process that has ended."""
        del self._processes[process.name]
        self._unregister(process)
        process.close()

    def _unregister(self, process: ServerProcess) -> None:
        """Unregisters the descriptors of a process from the poller; `woken_by` may have unregistered some before."""
        assert isinstance(process, Child | Fork)
        line = process.line if isinstance(process, Child) else None
        for descriptor in (process.descriptor, None if line is None else line.fileno()):
            with suppress(KeyError):
                self._poller.unregister(descriptor)

    def woken_by(self, descriptors: dict[object, int]) -> None:
        """Handles the descriptors that the poller found readable. Each process's end is reported once."""
        self._zygote.woken_by(descriptors)
        if not self._zygote.is_starting:
            while self._waiting:
                self.start(self._waiting.pop(0))
        for child in [process for process in self.all() if isinstance(process, Child)]:
            if child.line is not None and child.line.fileno() in descriptors:
                self._hear(child, child.line)
            if child.descriptor in descriptors:
                self._poller.unregister(child.descriptor)  # otherwise it stays readable forever
        worker, keeper = self._processes.get(WORKER), self.keeper
        if isinstance(worker, Fork) and worker.descriptor in descriptors and keeper is not None:
            self._poller.unregister(worker.descriptor)
            keeper.go_on()  # resume it, as it has a report to send

    def _hear(self, keeper: Child, line: socket.socket) -> None:
        """Handles a report of the process with the weights about the worker that it forked: see
        `worker/loading/keeper.py`."""
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
        """pid 0: not known yet."""
        worker = self._processes[WORKER]
        assert isinstance(worker, Fork)
        self._unregister(worker)
        worker.begin(pid)
        if worker.descriptor is not None:
            self._poller.register(worker.descriptor, zmq.POLLIN)

    def end_with_keeper(self, worker: Fork) -> None:
        """Marks a worker as ended that the kernel killed when its keeper died; the keeper could not report it."""
        keeper = self.keeper
        if worker.alive and keeper is not None and not keeper.alive:
            worker.ended = -signal.SIGKILL
            worker.given_up, worker.was_stopped = keeper.given_up, keeper.was_stopped

    def owing(self, ready: Container[str]) -> list[ServerProcess]:
        """Returns the processes that have work to finish: those still starting (not in `ready`), and the process
        with the weights while it has a worker's end to report or a worker to fork."""
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
        """Returns the processes that may be idle for long and are not asked for heartbeats."""
        worker = [self._processes[WORKER]] if WORKER in ready and self.is_alive(WORKER) else []
        return [*worker, *self._zygote.processes(is_starting=False)]

    def worker_is_left(self, ready: Container[str]) -> bool:
        """Returns whether the worker lost its router and is not listening for the next one yet, because it still
        computes a step. (A link to a remote worker listens only while it is connected.)"""
        is_ours = WORKER in ready and WORKER not in self._modules and self.is_alive(WORKER)
        return (
            is_ours and ROUTER in self._processes and ROUTER not in ready and not self._paths.worker.exists()
        )

    def go_on(self) -> None:
        """Resumes all stopped processes."""
        for process in self.all():
            process.go_on()

    def want_no_other_worker(self) -> None:
        """Tells the process with the weights to end when its worker ends."""
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
        """Returns the memory of the launcher and all processes in bytes. Shared pages, such as a mapped model's,
        count once (PSS)."""
        pids = [process.pid for process in (*self._zygote.processes(), *self.all())]
        return sum(map(memory_of, [os.getpid(), *pids]))
