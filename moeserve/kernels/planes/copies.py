"""Pieces of pinned memory of the host to a GPU by one launch that takes few of its multiprocessors; and values that
belong to what has arrived.

A piece through the copying engine takes the host some 10 us to launch, which is what PCIe takes for half a megabyte.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from moeserve.kernels.launch import kernel, next_power_of_2

PROGRAMS = 16  # with CHUNK bytes each on their way
CHUNK = 8 << 10


@kernel
def copy_scattered_kernel(copies, PROGRAMS: tl.constexpr, WORDS: tl.constexpr):
    """Grid (PROGRAMS). copies int64 [1 + n, 3]: n, then of each piece where it is, where it goes (both aligned to 16)
    and its bytes, a multiple of 4. WORDS: int32 that a program copies at once."""
    w = tl.arange(0, WORDS)
    for piece in range(1, 1 + tl.load(copies).to(tl.int32)):
        source = tl.multiple_of(tl.load(copies + 3 * piece), 16).to(tl.pointer_type(tl.int32))
        target = tl.multiple_of(tl.load(copies + 3 * piece + 1), 16).to(tl.pointer_type(tl.int32))
        words = tl.load(copies + 3 * piece + 2).to(tl.int32) // 4
        for first in range(tl.program_id(0) * WORDS, words, PROGRAMS * WORDS):
            at = first + w
            tl.store(target + at, tl.load(source + at, at < words), at < words)


def copy_scattered(copies: Tensor) -> None:
    """Launches it. copies: int64 [1 + n, 3] on the device, as the kernel has them; more rows may follow."""
    copy_scattered_kernel((PROGRAMS,), copies, PROGRAMS, CHUNK // 4, num_warps=8)


@kernel
def store_scattered_kernel(table, entries, SIZE: tl.constexpr):
    """One program: entries int64 [1 + n, 2]: n < SIZE, then of each value where it goes in table, int32, and itself."""
    i = tl.arange(0, SIZE)
    live = i < tl.load(entries)
    at = tl.load(entries + 2 + 2 * i, live, 0)
    value = tl.load(entries + 3 + 2 * i, live, 0).to(tl.int32)
    tl.atomic_xchg(table + at, value, live, sem="release", scope="gpu")


def store_scattered(table: Tensor, entries: Tensor) -> None:
    """Launches it. table: int32 on the device, contiguous, which other kernels may read meanwhile. entries: int64
    [1 + n, 2] on the device, as the kernel has them; more rows may follow."""
    store_scattered_kernel((1,), table, entries, next_power_of_2(len(entries)), num_warps=1)
