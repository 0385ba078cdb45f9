"""The keeper: a process that holds data which is slow to load, and forks the workers that serve.

Loading a large model takes minutes, and a crash must not repeat it. So the keeper loads the weights and then only
forks; a fork starts threads, allocates the KV pool and serves. The weights are in memory once, shared copy-on-write and
never written. When a fork crashes, the keeper tells the launcher, which asks for another; that one is ready in well
under a second.

A GPU's driver does not survive a fork. With a GPU, the keeper therefore holds only what a worker needs before it
initialises the GPU (`inherited.py`): modules and vocabulary.

When it forks, the keeper has no threads and no sockets except its line to the launcher, its standard input.
Messages:

    keeper    started PID             a fork was made
              ended PID STATUS        it crashed: the exit code, or minus the signal
    launcher  again                   fork another one; end of file: exit

A fork that exits with code 0 ends its keeper.
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
    """Forks processes that call `serve(is_first)`, one after another. Returns when no further fork is needed. prepare:
    called while the first fork runs, to prepare data for later forks; it must leave no thread running."""
    process.close_sockets()
    setproctitle(f"moeserve: {title}")
    keeper, is_first = os.getpid(), True
    while True:
        pid = os.fork()
        if pid == 0:
            # The fork closes its copy of the keeper's line to the launcher.
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
    """Runs the fork. Returns its exit code."""
    die_with(keeper)
    setproctitle("moeserve: worker")
    process.open_sockets()
    code = guarded(process, lambda _: serve(is_first))
    process.close()
    logging.shutdown()
    return code
