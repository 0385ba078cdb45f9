"""A limit of locked memory that holds for root, too."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_CAP_IPC_LOCK: Final = 14  # linux/capability.h: whoever has it may lock everything
_VERSION_3: Final = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Set(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextmanager
def locked_memory_limit(limit: int) -> Iterator[None]:
    """Within, this thread may lock `limit` bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    header, before = _Header(_VERSION_3, 0), (_Set * 2)()

    def call(name: str, sets: ctypes.Array[_Set]) -> None:
        if getattr(libc, name)(ctypes.byref(header), sets) != 0:
            raise OSError(ctypes.get_errno(), name)

    call("capget", before)
    without = (_Set * 2)(*before)
    without[0].effective &= ~(1 << _CAP_IPC_LOCK)
    call("capset", without)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
        call("capset", before)


def locked_bytes() -> int:
    """Bytes that this process has locked."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no VmLck")
