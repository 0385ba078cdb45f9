"""Forks processes of the server at the launcher's request.

When it forks, the zygote has no threads and no sockets except its line to the launcher, its standard input.
Messages:

    zygote    ready                   it can fork
              failed                  a fork failed
    launcher  NAME                    fork the process NAME; end of file: exit
    fork      started PID             it runs, and is the launcher's child

A fork has its own process group and is a child of the launcher, not of the zygote: it dies with the launcher, which
reaps it, and survives the zygote. To that end the zygote forks twice: the process in between exits at once, and the
launcher, as subreaper (PR_SET_CHILD_SUBREAPER), adopts the orphan.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NoReturn

from moeserve.processes.lifecycle import EXIT_BUG, Process, run_process

ADOPTED_S: Final = 1.0  # time limit for the launcher to adopt a fork
_LOOK_S: Final = 0.0005

Main = Callable[[Process], None]


def serve_forks(process: Process, line: socket.socket, mains: Mapping[str, Main]) -> None:
    """Forks at the launcher's request until end of file. Each fork calls the function in `mains` of the requested
    name."""
    process.close_sockets()
    launcher = os.getppid()
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would write to the shared pages, and so copy them
    line.sendall(b"ready\n")
    while name := line.recv(64).decode().strip():
        if not _fork_twice(partial(_live, line, launcher, name, mains[name])):
            line.sendall(b"failed\n")
    process.open_sockets()


def _fork_twice(live: Callable[[], NoReturn]) -> bool:
    """Calls `live` in an orphaned process. Returns False if the kernel has no memory or process id left."""
    try:
        between = os.fork()
    except OSError:
        return False
    if between == 0:
        try:
            if os.fork() == 0:
                live()
        except OSError:
            os._exit(EXIT_BUG)
        os._exit(0)
    return os.waitpid(between, 0)[1] == 0


def _live(line: socket.socket, launcher: int, name: str, main: Main) -> NoReturn:
    """Runs in the fork: becomes the process `name` and never returns."""
    try:
        _wait_for_parent(launcher)
        os.setpgid(0, 0)
        line.sendall(f"started {os.getpid()}\n".encode())
        os.dup2(os.open(os.devnull, os.O_RDONLY), line.fileno())
        run_process(name, main)
    finally:  # reached only if that failed
        logging.shutdown()
        os._exit(EXIT_BUG)


def _wait_for_parent(launcher: int) -> None:
    """Waits until the launcher is this process's parent. Raises TimeoutError."""
    deadline = time.monotonic() + ADOPTED_S
    while os.getppid() != launcher:
        if time.monotonic() > deadline:
            raise TimeoutError("the launcher has not adopted this process")
        time.sleep(_LOOK_S)
