"""Messages of single numbers between GPUs, each sent together with its call's number: no fence or barrier is
needed.

The sender writes a number into an inbox in the other GPU's memory as a word of 8 bytes, with the call's number in
the upper half. A word is written atomically, so a receiver that sees the call's number also has the number itself
(the idea is NCCL's LL protocol).

An inbox, int64 [2, ranks, CAPACITY], has two halves, used alternately. A GPU that writes call n + 2 has received
all words of call n + 1, so its peers have read call n's, whose half it overwrites.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def send_words(value, call, peers, i, live, RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr):
    """Writes float32 value to offsets i of all other GPUs' inboxes. peers int64 [RANKS]: addresses of the inboxes."""
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
    """Waits for the other GPUs' numbers at offsets i of this GPU's inbox. Returns float32 `own` plus these, added
    in order of the ranks. POLLS: in a trial, the most polls; 0: unlimited."""
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
