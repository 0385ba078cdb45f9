"""Messages of whole rows between GPUs, each row followed by a flag: for large messages, where bytes count.

The sender writes a row into an inbox in the other GPU's memory, then the call's number into the row's flag there.
An inbox, [2, ranks - 1, CAPACITY], and its flags, int32 [2, ranks - 1, ROWS], have two halves, used alternately as in
words.py.
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
    """Writes value to offsets i of all other GPUs' inboxes, then the call's number to the row's flag. peers,
    peer_flags int64 [RANKS]: addresses of all inboxes and of their flags."""
    half = (call & 1) * (RANKS - 1)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            slot = half + RANK - (1 if peer < RANK else 0)
            there = tl.load(peers + peer).to(tl.pointer_type(value.dtype))
            tl.store(there + slot.to(tl.int64) * CAPACITY + i, value, live)
    tl.debug_barrier()  # all threads must have written before the flag is set
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
    """Waits for the other GPUs' numbers at offsets i of this GPU's inbox. Returns float32: `own` plus these, added
    in order of the ranks. POLLS: in a trial, the most polls; 0: unlimited."""
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
