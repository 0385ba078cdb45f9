"""Forks that are processes of the server like any other, as the launcher asks for them.

The zygote has no threads and no sockets when it forks, but one line to the launcher, its standard input:

    zygote    ready                   it can fork
              failed                  it could not
    launcher  NAME                    make one; the end of the line: exit
    fork      started PID             it lives, and is the launcher's child

A fork is its own process group and the child of the launcher, not of the zygote: it dies with the launcher, which waits
for its end, and outlives the zygote. So it is forked twice. The process between ends at once, and the launcher adopts
what it has left (PR_SET_CHILD_SUBREAPER).
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

ADOPTED_S: Final = 1.0  # until a fork is the launcher's child
_LOOK_S: Final = 0.0005

Main = Callable[[Process], None]


def serve_forks(process: Process, line: socket.socket, mains: Mapping[str, Main]) -> None:
    """Has forks call one of `mains`, each as the process of that name; returns at the end of the line."""
    process.close_sockets()
    launcher = os.getppid()
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, what is shared
    line.sendall(b"ready\n")
    while name := line.recv(64).decode().strip():
        if not _fork_twice(partial(_live, line, launcher, name, mains[name])):
            line.sendall(b"failed\n")
    process.open_sockets()


def _fork_twice(live: Callable[[], NoReturn]) -> bool:
    """Has an orphan call `live`. False where there is no memory, or no process, left for it."""
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
    """The fork's life."""
    try:
        _wait_for_parent(launcher)
        os.setpgid(0, 0)
        line.sendall(f"started {os.getpid()}\n".encode())
        os.dup2(os.open(os.devnull, os.O_RDONLY), line.fileno())
        run_process(name, main)
    finally:  # it could not become one
        logging.shutdown()
        os._exit(EXIT_BUG)


def _wait_for_parent(launcher: int) -> None:
    """Raises TimeoutError when it does not adopt this process."""
    deadline = time.monotonic() + ADOPTED_S
    while os.getppid() != launcher:
        if time.monotonic() > deadline:
            raise TimeoutError("the launcher has not adopted this process")
        time.sleep(_LOOK_S)
