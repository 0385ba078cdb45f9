"""Rows that go from GPU to GPU as they are, each followed by a flag: for messages whose bytes count.

A row is written into an inbox in the other GPU's memory, then the number of the call to the row's flag there. An inbox,
[2, ranks - 1, CAPACITY], and its flags, int32 [2, ranks - 1, ROWS], have two halves, used in turn as those of words.py.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def send_row(
    value, call, peers, peer_flags, row, i, live,
    RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """value to places i of all other GPUs' inboxes, the call to the row's flag. peers, peer_flags int64 [RANKS]: the
    addresses of all inboxes and of their flags."""
    half = (call & 1) * (RANKS - 1)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            slot = half + RANK - (1 if peer < RANK else 0)
            there = tl.load(peers + peer).to(tl.pointer_type(value.dtype))
            tl.store(there + slot.to(tl.int64) * CAPACITY + i, value, live)
    tl.debug_barrier()  # all threads have written before one of them says so
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            slot = half + RANK - (1 if peer < RANK else 0)
            flag = tl.load(peer_flags + peer).to(tl.pointer_type(tl.int32)) + slot * ROWS + row
            tl.atomic_xchg(flag, call, sem="release", scope="sys")


@triton.jit
def sum_rows(
    own, call, inbox, flags, row, i, live,
    RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, ROWS: tl.constexpr, POLLS: tl.constexpr,
):  # fmt: skip
    """float32: own with what has come from the others to places i of this GPU's inbox, in the order of the ranks. Waits
    for it. POLLS: most waits of a trial, 0: as long as it takes."""
    half = (call & 1) * (RANKS - 1)
    total = tl.zeros(own.shape, tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += own.to(tl.float32)
        else:
            slot = half + peer - (1 if peer > RANK else 0)
            flag = flags + slot * ROWS + row
            waiting = (tl.atomic_add(flag, 0, sem="acquire", scope="sys") != call).to(tl.int32)
            polls = 0
            while waiting > 0:
                waiting = (tl.atomic_add(flag, 0, sem="acquire", scope="sys") != call).to(tl.int32)
                if POLLS > 0:
                    polls += 1
                    waiting = tl.where(polls < POLLS, waiting, 0)
            got = tl.load(inbox + slot.to(tl.int64) * CAPACITY + i, live, 0.0, volatile=True)
            total += got.to(tl.float32)
    return total
