"""The kernel's calls that a server cannot do without."""

from __future__ import annotations

import errno
import os

from moeserve.errors import ConfigError


def check_kernel_calls() -> None:
    """Raises ConfigError if this process cannot watch another by a descriptor (pidfd_open(2)): the launcher learns so
    that a process has ended. Kernels before 5.3 lack the call (that of Debian 10, for instance), and old container
    runtimes forbid calls that they do not know. Some builds of Python lack it, too, whatever the kernel."""
    if not hasattr(os, "pidfd_open"):
        raise ConfigError(
            "this Python was compiled with the headers of a kernel before Linux 5.3, so it has no os.pidfd_open: use "
            "another Python, such as the distribution's"
        )
    try:
        os.close(os.pidfd_open(os.getpid()))
    except PermissionError as error:
        raise ConfigError(
            "the container's seccomp profile forbids pidfd_open: update the container runtime (Docker 20.10), or allow "
            "the call"
        ) from error
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise ConfigError(
                f"pidfd_open failed ({error.strerror}): free memory and open files of the machine"
            ) from error
        raise ConfigError(
            f"the kernel, Linux {os.uname().release}, has no pidfd_open ({error.strerror}): a server needs Linux 5.3 "
            "or newer"
        ) from error
