"""How much memory is left for the KV pool."""

from __future__ import annotations

import psutil

from moeserve.control_groups import memory_left, memory_limit
from moeserve.units import GIB


def available_bytes() -> int:
    """Bytes that can be had without swapping: the machine's, or what is left of the control groups' limit (a
    container's, systemd's MemoryMax) if that is less."""
    available = int(psutil.virtual_memory().available)
    left = memory_left()
    return available if left is None else min(available, left)


def limit_note() -> str:
    """Says, at the end of a sentence about free memory, that a control group bounds it; "" where none does."""
    limit = memory_limit()
    if limit is None or limit >= psutil.virtual_memory().total:
        return ""
    return f" (a control group limits this process to {limit / GIB:.2f} GiB)"
