"""The kernel's limits of a process (getrlimit(2)): what a server needs of them, and the limits that it sets itself."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

from moeserve.config.units import GIB
from moeserve.errors import ConfigError

MAX_OPEN_FILES: Final = 65536
MIN_OPEN_FILES: Final = 256
MIN_ADDRESS_SPACE: Final = 3 * GIB // 2  # what the worker maps before it has any weights: PyTorch's libraries


def prepare_limits() -> None:
    """Raises the soft limit of open files, which all processes inherit: the usual 1024 is less than the connections
    that the queue holds. Raises ConfigError where a limit is too low for any server."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
        raise ConfigError(
            f"the limit of open files is {files}, and a server needs {MIN_OPEN_FILES} at least: raise it (ulimit -n, "
            "LimitNOFILE= of systemd, nofile of Docker's ulimits)"
        )
    wanted = MAX_OPEN_FILES if files == resource.RLIM_INFINITY else min(files, MAX_OPEN_FILES)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, files))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < MIN_ADDRESS_SPACE:
        raise ConfigError(
            f"the limit of address space is {space / GIB:.2f} GiB, and a server needs {MIN_ADDRESS_SPACE / GIB:.1f} "
            "GiB beside weights and KV cache: raise it (ulimit -v unlimited, LimitAS= of systemd)"
        )


def bound_memory(more: int) -> None:
    """Lets this process take `more` bytes beyond what it has: an allocation that needs more fails (MemoryError)."""
    limit = _bytes_of(5) + more
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def address_space_left() -> int | None:
    """Bytes that this process may still map; None where there is no limit."""
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if space == resource.RLIM_INFINITY else max(0, space - _bytes_of(0))


def _bytes_of(field: int) -> int:
    """A field of /proc/self/statm (proc(5)), which counts pages: 0 is the address space, 5 data and stack."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()
