"""What a stand-in does between its start and its end."""

from __future__ import annotations

import os
import signal
import socket
import time

from moeserve.errors import UserError
from moeserve.messages import codec
from moeserve.messages.channels import PullChannel
from moeserve.messages.schema import Shutdown, WorkerReady
from moeserve.process import Process, run_process

ENGINE = WorkerReady(65_536, 8, 512, 1000, 0, 0, 0, "cpu (test)")


def run(name: str) -> None:
    run_process(name, main)


def main(process: Process) -> None:
    who, _, what = os.environ.get("LAUNCHER_TEST", "").partition(":")
    what = what if who == process.name else ""
    if what == "user error":
        raise UserError("port 8000 is in use; choose another with --port")
    if what == "busy port":
        socket.create_server(("127.0.0.1", process.config.port))
    if what == "bug":
        raise RuntimeError("a bug")
    if what == "killed while starting":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "slow start":
        time.sleep(60)
    {"httpserver": httpserver, "worker": worker}.get(process.name, inner)(process, what)


def httpserver(process: Process, what: str) -> None:
    stop = [False]
    if what != "hang":
        signal.signal(signal.SIGTERM, lambda *_: stop.__setitem__(0, True))
    process.ready(url=f"http://127.0.0.1:{process.config.port}")
    while not stop[0]:
        time.sleep(0.01)


def inner(process: Process, what: str) -> None:
    """Router and detokenizer end on Shutdown; the router then lets go of the worker."""
    addresses = {
        "router": (process.paths.router, codec.TO_ROUTER),
        "detokenizer": (process.paths.detokenizer, codec.TO_DETOKENIZER),
    }
    address, decoder = addresses[process.name]
    inbox: PullChannel[object] = PullChannel(process.context, address, decoder)  # type: ignore[arg-type]
    process.ready()
    if what == "bug while serving":
        time.sleep(0.3)
        raise RuntimeError("a bug while serving")
    while not isinstance(inbox.recv(), Shutdown) or what == "hang":
        pass
    if process.name == "router":
        with socket.socket(socket.AF_UNIX) as line:
            line.connect_ex(str(process.paths.worker))


def worker(process: Process, what: str) -> None:
    """Ends when the router calls."""
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(process.paths.worker))
        line.listen()
        process.ready(engine=ENGINE)
        line.accept()
