"""How much memory is left for the KV pool."""

from __future__ import annotations

from typing import Final

import psutil

from moeserve.config.units import GIB
from moeserve.processes.control_groups import memory_left, memory_limit
from moeserve.processes.limits import address_space_left

SPARE_ADDRESS_SPACE: Final = 256 << 20  # for threads' stacks and small allocations


def available_bytes() -> int:
    """Bytes that can be had without swapping: the machine's, or what is left of the control groups' limit (a
    container's, systemd's MemoryMax) or of this process's address space (ulimit -v) if that is less."""
    bounds = [int(psutil.virtual_memory().available)]
    if (left := memory_left()) is not None:
        bounds.append(left)
    if (space := address_space_left()) is not None:
        bounds.append(max(0, space - SPARE_ADDRESS_SPACE))
    return min(bounds)


def limit_note() -> str:
    """Says, at the end of a sentence about free memory, what bounds it; "" where only the machine does."""
    if (space := address_space_left()) is not None and space < psutil.virtual_memory().available:
        return f" (ulimit -v leaves this process {space / GIB:.2f} GiB)"
    limit = memory_limit()
    if limit is None or limit >= psutil.virtual_memory().total:
        return ""
    return f" (a control group limits this process to {limit / GIB:.2f} GiB)"
