"""The process that keeps what took long, and the forks of it that serve.

Loading takes minutes where a model is large, and a crash must not cost them again. So the process that has loaded the
weights does nothing else: it forks, and the fork starts threads, allocates the KV pool and serves. The weights are in
memory once, shared copy-on-write and never written to. When the fork crashes, the launcher is told, and has another one
forked: it is ready in well under a second.

On a GPU, whose driver survives no fork, the keeper has what a worker needs before it asks for the GPU (`inherited.py`):
its modules, and the vocabulary.

The keeper has no threads and no sockets when it forks, but one line to the launcher, its standard input:

    keeper    started PID             a fork was made
              ended PID STATUS        it has crashed: the exit code, or minus the signal
    launcher  again                   make another one; the end of the line: exit

A fork that ends well (exit code 0) ends its keeper.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

from setproctitle import setproctitle

from moeserve.processes.lifecycle import Process, die_with, guarded

log = logging.getLogger(__name__)


def keep(
    process: Process,
    line: socket.socket,
    serve: Callable[[bool], None],
    title: str = "weights",
    prepare: Callable[[], None] | None = None,
) -> None:
    """Has forks call `serve`, which is told whether it is the first, one after another; returns when there need not be
    another. prepare: done beside the first fork, for those to come; it leaves no thread behind."""
    process.close_sockets()
    setproctitle(f"moeserve: {title}")
    keeper, is_first = os.getpid(), True
    while True:
        pid = os.fork()
        if pid == 0:
            # No worker reads or writes what is the keeper's.
            os.dup2(os.open(os.devnull, os.O_RDONLY), line.fileno())
            os._exit(_serve(process, keeper, serve, is_first))
        line.sendall(f"started {pid}\n".encode())
        if prepare is not None and is_first:
            prepare()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        line.sendall(f"ended {pid} {status}\n".encode())
        if status == 0 or not line.recv(64):
            break
        is_first = False
    process.open_sockets()


def _serve(process: Process, keeper: int, serve: Callable[[bool], None], is_first: bool) -> int:
    """The fork's life; its exit code."""
    die_with(keeper)
    setproctitle("moeserve: worker")
    process.open_sockets()
    code = guarded(process, lambda _: serve(is_first))
    process.close()
    logging.shutdown()
    return code
