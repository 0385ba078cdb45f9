"""The sandboxed process's side: drops all privileges that its work does not need before it reads untrusted input.

Its standard input is the socket to its parent. It is killed when the thread that started it ends.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import socket

import setproctitle

from . import system_calls

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def begin(name: str) -> socket.socket:
    """Sets the process name `moeserve: <name>` and returns the socket to the parent."""
    setproctitle.setproctitle(f"moeserve: {name}")
    channel = socket.socket(fileno=0)
    # a terminal or systemd signals the whole group; only the parent decides when this process ends
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return channel


def confine(memory_bytes: int) -> None:
    """Drops privileges: from now on this process cannot open files or sockets, dump core, or affect other processes,
    and can allocate at most `memory_bytes` more address space."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        in_use = int(statm.read().split()[0]) * resource.getpagesize()
    limit = in_use + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # the socket, stdout and stderr use all allowed descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    system_calls.restrict()  # only where the kernel supports seccomp; the limits above always hold
