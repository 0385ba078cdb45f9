"""Locks the RAM slots of experts on disk, so that the kernel does not move them to swap: a slot read back from swap
costs as much as reading the expert from its file, which the slot is there to avoid, and steps wait for it.

Locking is a help, never a condition: a server whose limit is too low logs the reason and serves.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Sequence
from typing import Final

import psutil

from moeserve.config.units import GIB
from moeserve.kernels.cpu_stream import Matrix
from moeserve.placement.expert_ram import MARGIN_BYTES
from moeserve.processes.free_memory import available_bytes
from moeserve.processes.limits import lockable_bytes

log = logging.getLogger(__name__)

# Linux/mman.h: locks pages that are in memory, and other pages when they are first used.
_MLOCK_ONFAULT: Final = 1
# With less free memory beside the slots, the kernel needs pages that it can move to swap. The default of --expert-ram
# leaves twice as much, of which the server's other processes may have taken a part.
LEAST_FREE_BYTES: Final = MARGIN_BYTES // 2


def lock_slots(matrices: Sequence[Matrix]) -> bool:
    """Locks the RAM slots of experts on disk in memory (mlock): all of them or, where a limit is too low, none. Their
    memory must be allocated. Logs the result. Returns whether they are locked."""
    size = sum(matrix.bytes for matrix in matrices)
    free = available_bytes()
    if free < LEAST_FREE_BYTES:
        _log_unlocked(size, f"only {free / GIB:.2f} GiB of memory are free beside them; lower --expert-ram")
        return False
    for index, matrix in enumerate(matrices):
        if code := _lock(matrix):
            for locked in matrices[:index]:
                _libc().munlock(ctypes.c_void_p(locked.address), ctypes.c_size_t(locked.bytes))
            _log_unlocked(size, _reason(code))
            return False
    log.info("%.2f GiB of RAM slots of experts are locked: they are not moved to swap", size / GIB)
    return True


def swap_bytes() -> int:
    return int(psutil.swap_memory().total)


def _log_unlocked(size: int, reason: str) -> None:
    """Logs a warning if the slots could be moved to swap, otherwise a note."""
    has_swap = swap_bytes() > 0
    effect = "may be moved to swap" if has_swap else "stay in RAM as long as there is no swap"
    level = logging.WARNING if has_swap else logging.INFO
    log.log(level, "%.2f GiB of RAM slots of experts are not locked and %s: %s", size / GIB, effect, reason)


def _reason(code: int) -> str:
    """Returns why locking failed. code: errno of mlock2(2), which is the same for several causes."""
    limit = lockable_bytes()
    if code in (errno.EPERM, errno.ENOMEM, errno.EAGAIN) and limit is not None:
        return (
            f"ulimit -l allows {limit / (1 << 20):g} MiB; raise it (LimitMEMLOCK=infinity of systemd, "
            "--ulimit memlock=-1 of Docker)"
        )
    return f"mlock2: {os.strerror(code)}"


def _lock(matrix: Matrix) -> int:
    """Returns 0, or the errno."""
    libc = _libc()
    if not hasattr(libc, "mlock2"):
        return errno.ENOSYS  # an older libc
    address, size = ctypes.c_void_p(matrix.address), ctypes.c_size_t(matrix.bytes)
    return 0 if libc.mlock2(address, size, _MLOCK_ONFAULT) == 0 else ctypes.get_errno()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
