"""The kernel's resource limits of a process (getrlimit(2)): checks the limits that a server needs, and sets its own."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.processes.control_groups import tasks_allowed, tasks_left
from moeserve.processes.cpus import usable_cores
from moeserve.processes.kernel_calls import check_kernel_calls

MAX_OPEN_FILES: Final = 65536
MIN_OPEN_FILES: Final = 256
# address space that PyTorch's libraries map in the worker before any weights are loaded
MIN_ADDRESS_SPACE: Final = 3 * GIB // 2
# Python's guard against deep recursion counts calls, not bytes: on a smaller stack a nested request ends the process.
MIN_STACK: Final = 2 << 20
USUAL_STACK: Final = 8 << 20  # of Linux distributions; a thread's stack has the size of this limit
# Processes and threads that a server has besides those that compute: 28 when it is ready, and some under load.
MIN_TASKS: Final = 32
# linux/capability.h: the capability to lock any amount of memory, which root has outside of containers
_CAP_IPC_LOCK: Final = 14


def prepare_limits(threads: int | None = None, *, beside_others: bool = True) -> None:
    """Raises the soft limits of open files, of the stack and of the user's processes, which all child processes
    inherit: the usual 1024 files are below the number of connections that the queue holds. Raises ConfigError if a hard
    limit is too low for any server, or if the kernel lacks a call.

    threads: the number of compute threads; None: one per usable core. beside_others: False judges the control groups'
    limit of processes and threads as if nothing ran in them."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
        raise ConfigError(
            f"the limit of open files is {files}, and a server needs {MIN_OPEN_FILES} at least: raise it (ulimit -n, "
            "LimitNOFILE= of systemd, nofile of Docker's ulimits)"
        )
    wanted = MAX_OPEN_FILES if files == resource.RLIM_INFINITY else min(files, MAX_OPEN_FILES)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, files))
    check_kernel_calls()
    _prepare_stack()
    _prepare_tasks(MIN_TASKS + (threads or usable_cores()), beside_others)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < MIN_ADDRESS_SPACE:
        raise ConfigError(
            f"the limit of address space is {space / GIB:.2f} GiB, and a server needs {MIN_ADDRESS_SPACE / GIB:.1f} "
            "GiB beside weights and KV cache: raise it (ulimit -v unlimited, LimitAS= of systemd)"
        )


def _prepare_stack() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if hard != resource.RLIM_INFINITY and hard < MIN_STACK:
        raise ConfigError(
            f"the limit of the stack is {hard >> 10} KiB, and a server needs {MIN_STACK >> 10}: raise it (ulimit -s, "
            "LimitSTACK= of systemd, stack of Docker's ulimits)"
        )
    if soft != resource.RLIM_INFINITY and soft < USUAL_STACK:
        wanted = USUAL_STACK if hard == resource.RLIM_INFINITY else min(hard, USUAL_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


def _prepare_tasks(needed: int, beside_others: bool) -> None:
    """Raises ConfigError if so few processes and threads are allowed that a thread of the start could not begin, which
    libraries answer by aborting the process."""
    allowed = tasks_left() if beside_others else tasks_allowed()
    if allowed is not None and allowed < needed:
        number = f"{allowed} more" if beside_others else f"{allowed}"
        raise ConfigError(
            f"the control group allows {number} processes and threads, and a server needs {needed} at least: raise the "
            "limit (pids_limit of Docker Compose, TasksMax= of systemd, podPidsLimit of Kubernetes)"
        )
    soft, most = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != most:
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    if os.geteuid() != 0 and most != resource.RLIM_INFINITY and most < needed:  # root has no such limit
        raise ConfigError(
            f"the limit of the user's processes and threads is {most}, and a server needs {needed} at least: raise it "
            "(ulimit -u, LimitNPROC= of systemd, nproc of Docker's ulimits)"
        )


def bound_memory(more: int) -> None:
    """Limits this process to `more` bytes beyond its present size: an allocation above that raises MemoryError."""
    limit = _bytes_of(5) + more
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def address_space_left() -> int | None:
    """Returns the bytes of address space that this process may still map; None if there is no limit."""
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if space == resource.RLIM_INFINITY else max(0, space - _bytes_of(0))


def lockable_bytes() -> int | None:
    """Returns the bytes that this process may lock in RAM (mlock(2)); None if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
            return None
    return None if limit == resource.RLIM_INFINITY else limit


def _bytes_of(field: int) -> int:
    """Returns a field of /proc/self/statm (proc(5)) in bytes. Field 0 is the address space, 5 data and stack."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()
