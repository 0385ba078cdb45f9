"""Numbers that go from GPU to GPU each with the number of its call: neither a fence nor a barrier is needed.

A number is written into an inbox in the other GPU's memory as a word of 8 bytes, the number of the call in its upper
half. A word is written whole, so whoever finds the call's number has the number, too (the idea is NCCL's LL protocol).

An inbox, int64 [2, ranks, CAPACITY], has two halves, used in turn. Whoever writes the call after next has received the
next one's words, and so its peers have read this one's.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def send_words(value, call, peers, i, live, RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr):
    """Stores value float32 at places i of all other GPUs' inboxes, at addresses peers int64 [RANKS]."""
    word = (call.to(tl.int64) << 32) | (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    half = (call & 1) * (RANKS * CAPACITY)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            there = tl.load(peers + peer).to(tl.pointer_type(tl.int64))
            tl.store(there + half + RANK * CAPACITY + i, word, live)


@triton.jit
def sum_words(
    own, call, inbox, i, live, RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, POLLS: tl.constexpr
):  # fmt: skip
    """own, float32, with what has come from the others to places i of this GPU's inbox, in the order of the ranks.
    Waits for it. POLLS: most waits of a trial, 0: as long as it takes."""
    half = (call & 1) * (RANKS * CAPACITY)
    total = tl.zeros(own.shape, tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += own
        else:
            at = inbox + half + peer * CAPACITY + i
            got = tl.load(at, live, 0, volatile=True)
            waiting = tl.max((live & ((got >> 32) != call)).to(tl.int32), 0)
            polls = 0
            while waiting > 0:
                got = tl.load(at, live, 0, volatile=True)
                waiting = tl.max((live & ((got >> 32) != call)).to(tl.int32), 0)
                if POLLS > 0:
                    polls += 1
                    waiting = tl.where(polls < POLLS, waiting, 0)
            total += (got & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return total
