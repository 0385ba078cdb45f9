"""The kernel's calls that a server cannot do without."""

from __future__ import annotations

import os

from moeserve.errors import ConfigError


def check_kernel_calls() -> None:
    """Raises ConfigError if this process cannot watch another by a descriptor (pidfd_open(2)): the launcher learns so
    that a process has ended. Kernels before 5.3 lack the call (that of Debian 10, for instance), and old container
    runtimes forbid calls that they do not know."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except PermissionError as error:
        raise ConfigError(
            "the container's seccomp profile forbids pidfd_open: update the container runtime (Docker 20.10), or allow "
            "the call"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the kernel, Linux {os.uname().release}, has no pidfd_open ({error.strerror}): a server needs Linux 5.3 "
            "or newer"
        ) from error
