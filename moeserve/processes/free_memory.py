"""Measures the memory that is available for the KV pool."""

from __future__ import annotations

from typing import Final

import psutil

from moeserve.config.units import GIB
from moeserve.processes.control_groups import memory_left, memory_limit, unused_memory
from moeserve.processes.limits import address_space_left

SPARE_ADDRESS_SPACE: Final = 256 << 20  # for threads' stacks and small allocations


def available_bytes() -> int:
    """Returns the bytes that can be allocated without swapping: the least of the machine's available memory, what is
    left under the control groups' limits (a container's, systemd's MemoryMax), and the free address space (ulimit
    -v)."""
    return _least_free()[0]


def limit_note() -> str:
    """Returns a phrase for the end of a message about free memory: which limit bounds it; "" if the machine does."""
    return _least_free()[1]


def _least_free() -> tuple[int, str]:
    """Returns the least of the bounds that `available_bytes` names, and the phrase of `limit_note` for it."""
    bounds = [(int(psutil.virtual_memory().available), "")]
    if (left := memory_left()) is not None and (limit := memory_limit()) is not None:
        bounds.append((left, f" (a control group limits this process to {limit / GIB:.2f} GiB)"))
    if (space := address_space_left()) is not None:
        note = f" (ulimit -v leaves this process {space / GIB:.2f} GiB)"
        bounds.append((max(0, space - SPARE_ADDRESS_SPACE), note))
    return min(bounds, key=lambda bound: bound[0])


def is_free_memory_short(needed: int) -> bool:
    """Returns whether less than `needed` bytes, and a sixteenth of the memory, are free: neither in use nor filled with
    cached files. The memory is the machine's, and likewise each control group's limit."""
    memory = psutil.virtual_memory()
    bounds = [(int(memory.total), int(memory.free)), *unused_memory()]
    return any(free < needed + total // 16 for total, free in bounds)
