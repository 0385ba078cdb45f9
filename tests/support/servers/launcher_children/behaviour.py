"""What a stand-in does between its start and its end."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable
from unittest.mock import patch

import psutil

from moeserve.errors import UserError
from moeserve.messages import codec
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.schema import HeartbeatRequest, ReplaceWorker, Shutdown
from moeserve.messages.steps import WorkerReady
from moeserve.processes.lifecycle import Process, line_to_launcher, run_process
from moeserve.processes.listeners import inherited_listeners, url_of
from moeserve.worker.loading import keeper

ENGINE = WorkerReady(65_536, 8, 512, 1000, 0, 0, "cpu (test)")


def run(name: str) -> None:
    run_process(name, main)


def main(process: Process) -> None:
    who, _, what = os.environ.get("LAUNCHER_TEST", "").partition(":")
    what = what if who == process.name else ""
    if what == "user error":
        raise UserError("port 8000 is in use; choose another with --port")
    if what == "no such file":
        open("/nowhere/at/all")  # noqa: SIM115
    if what == "bug":
        raise RuntimeError("a bug")
    if what == "bug as the next" and process.listens_when_ready:
        raise RuntimeError("a bug of the next version")
    if what == "killed while starting":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "slow start":
        time.sleep(60)
    if what == "stopped while starting":
        os.kill(os.getpid(), signal.SIGSTOP)
    {"httpserver": httpserver, "worker": worker}.get(process.name, inner)(process, what)


def httpserver(process: Process, what: str) -> None:
    stop = [False]
    if what != "hang":
        signal.signal(signal.SIGTERM, lambda *_: stop.__setitem__(0, True))
        signal.signal(signal.SIGUSR1, lambda *_: stop.__setitem__(0, True))
        signal.signal(signal.SIGHUP, lambda *_: print("httpserver has a SIGHUP", flush=True))
    listeners = inherited_listeners()
    inbox = PullChannel(process.context, process.paths.http, codec.TO_HTTP)
    print(f"serves requests from {process.first_request_id} on, {process.listens_when_ready=}", flush=True)
    process.ready(url=url_of(listeners[0]))
    if what == "bug while serving":
        bug_while_serving(process)
    while not stop[0]:
        message = inbox.recv(0.01)
        if isinstance(message, HeartbeatRequest):
            process.heartbeat()
        elif message is not None:
            print(message, flush=True)
    inbox.close()


def bug_while_serving(process: Process) -> None:
    """When the test says that all are ready."""
    while not (process.paths.directory / "go").exists():
        time.sleep(0.01)
    raise RuntimeError("a bug while serving")


def inner(process: Process, what: str) -> None:
    """Router and detokenizer end on Shutdown; the router then has the worker end. It says what the launcher tells it,
    and with "gives up" asks for another worker."""
    addresses = {
        "router": (process.paths.router, codec.TO_ROUTER),
        "detokenizer": (process.paths.detokenizer, codec.TO_DETOKENIZER),
    }
    address, decoder = addresses[process.name]
    inbox: PullChannel[object] = PullChannel(process.context, address, decoder)  # type: ignore[arg-type]
    line = socket.socket(socket.AF_UNIX)
    while process.name == "router" and line.connect_ex(str(process.paths.worker)):
        time.sleep(0.01)
    print(f"{process.name} was {'forked' if gc.get_freeze_count() else 'started'}", flush=True)
    process.ready()
    if what == "bug while serving":
        bug_while_serving(process)
    if what == "gives up":
        give_up_the_worker(process)
    while not isinstance(message := inbox.recv(), Shutdown) or what == "hang":
        if isinstance(message, HeartbeatRequest):
            process.heartbeat()
        else:
            print(message, flush=True)
    if process.name == "router":
        end_worker(process, line)
    line.close()


def end_worker(process: Process, line: socket.socket) -> None:
    try:
        line.sendall(b"end")
    except BrokenPipeError:  # it is another one by now
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(process.paths.worker))
            other.sendall(b"end")


def give_up_the_worker(process: Process) -> None:
    launcher = PushChannel(process.context, process.paths.launcher)
    time.sleep(1)  # everything is ready, and was seen to be
    (worker,) = [p for p in psutil.Process(os.getppid()).children() if p.cmdline()[0] == "moeserve: worker"]
    launcher.send(ReplaceWorker(pid=worker.pid, cause="the worker does not answer"))
    launcher.send(ReplaceWorker(pid=worker.pid, cause="said twice"))
    launcher.close()


def worker(process: Process, what: str) -> None:
    """Ends when a router says so, and outlives those that go away. With "dies again", only the first one starts. What
    begins with "forked" is forked by a process that keeps nothing."""
    if what.startswith("forked"):
        line = line_to_launcher()
        assert line is not None
        forks = hanging_forks() if what == "forked, keeper hangs" else os.fork
        with patch("os.fork", forks):
            keeper.keep(process, line, lambda is_first: serve_routers(process, what, is_first=is_first))
        return
    again = process.paths.directory / "again"
    if again.exists() and what == "dies again":
        raise UserError("there is no room for the model any more")
    again.touch()
    serve_routers(process, what)


def hanging_forks() -> Callable[[], int]:
    """In the place of os.fork: the second time, where the launcher wants another worker, it never returns."""
    calls, real_fork = itertools.count(), os.fork

    def fork() -> int:
        if next(calls):
            time.sleep(3600)
        return real_fork()

    return fork


def serve_routers(process: Process, what: str, *, is_first: bool = True) -> None:
    if what == "forked, the next are stopped" and not is_first:
        os.kill(os.getpid(), signal.SIGSTOP)
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(process.paths.worker))
        line.listen()
        process.ready(engine=ENGINE)
        if what == "computes for ever":
            compute_for_ever(process, line)
        while not line.accept()[0].recv(1):
            pass


def compute_for_ever(process: Process, line: socket.socket) -> None:
    """For the first router, whatever becomes of it."""
    line.accept()
    process.paths.worker.unlink()
    while True:
        time.sleep(0.01)
