"""What a sandboxed process does before it meets untrusted input: it gives up what its work has no use for.

Its standard input is the socket to its parent. It dies with the thread that started it.
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
    """Takes the name `moeserve: <name>` and returns the line to the parent."""
    setproctitle.setproctitle(f"moeserve: {name}")
    channel = socket.socket(fileno=0)
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach whole groups; the parent alone decides
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return channel


def confine(memory_bytes: int) -> None:
    """From here on no file or socket can be opened, no core dumped, nothing done to another process or a file, and no
    more than `memory_bytes` of address space taken beyond what is in use."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        in_use = int(statm.read().split()[0]) * resource.getpagesize()
    limit = in_use + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # the socket, stdout and stderr: no descriptor is left
    system_calls.restrict()  # where the kernel has it; the limits above hold everywhere
