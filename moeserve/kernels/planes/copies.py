"""Copies many pieces of pinned host memory to a GPU in one launch that occupies few multiprocessors; and stores
table entries for pieces that have arrived.

A piece copied by the copy engine takes the host about 10 us to launch, which is PCIe's time for half a megabyte.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from moeserve.kernels.launch import kernel, next_power_of_2

PROGRAMS = 16  # each with CHUNK bytes in flight
CHUNK = 8 << 10


@kernel
def copy_scattered_kernel(copies, PROGRAMS: tl.constexpr, WORDS: tl.constexpr):
    """Copies the pieces that a table lists. Grid (PROGRAMS). copies int64 [1 + n, 3]: n, then for each piece its
    source, its target (both aligned to 16 bytes) and its bytes, a multiple of 4. WORDS: int32 words that a program
    copies at a time."""
    w = tl.arange(0, WORDS)
    for piece in range(1, 1 + tl.load(copies).to(tl.int32)):
        source = tl.multiple_of(tl.load(copies + 3 * piece), 16).to(tl.pointer_type(tl.int32))
        target = tl.multiple_of(tl.load(copies + 3 * piece + 1), 16).to(tl.pointer_type(tl.int32))
        words = tl.load(copies + 3 * piece + 2).to(tl.int32) // 4
        for first in range(tl.program_id(0) * WORDS, words, PROGRAMS * WORDS):
            at = first + w
            tl.store(target + at, tl.load(source + at, at < words), at < words)


def copy_scattered(copies: Tensor, programs: int = PROGRAMS) -> None:
    """Launches the copies. copies: int64 [1 + n, 3] on the device, see the kernel; further rows may follow."""
    copy_scattered_kernel((programs,), copies, programs, CHUNK // 4, num_warps=8)


@kernel
def store_scattered_kernel(table, entries, SIZE: tl.constexpr):
    """One program. entries int64 [1 + n, 2]: n < SIZE, then for each value its index in table, int32, and the
    value."""
    i = tl.arange(0, SIZE)
    live = i < tl.load(entries)
    at = tl.load(entries + 2 + 2 * i, live, 0)
    value = tl.load(entries + 3 + 2 * i, live, 0).to(tl.int32)
    tl.atomic_xchg(table + at, value, live, sem="release", scope="gpu")


def store_scattered(table: Tensor, entries: Tensor) -> None:
    """Launches the stores. table: int32 on the device, contiguous; other kernels may read it meanwhile. entries:
    int64 [1 + n, 2] on the device, see the kernel; further rows may follow."""
    store_scattered_kernel((1,), table, entries, next_power_of_2(len(entries)), num_warps=1)
