"""DRY on the device: the repetitions in a slot's text, updated token by token (`csrc/sampling/dry.h`).

A slot with DRY has a record of int32 words, to which its row of parameters points: its number of tokens, the number
of tokens that the runs cover, the tokens after the last breaker. From HEADER on follow space for the tokens, as
much for the runs by lag, the bit mask of the single-token breakers, then the longer breakers, each terminated by
-1, and one more -1.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import kernel
from moeserve.kernels.sampling.columns import WORDS, column
from moeserve.kernels.sampling.filter_and_draw import TILE

ALLOWED_LENGTH = column("dry_allowed_length")
PENALTY_LAST_N = column("dry_penalty_last_n")
DRY = column("dry")
DRY_ROOM = column("dry_room")
HEADER = tl.constexpr(4)  # words of a record before its tokens


@triton.jit
def dry_record(settings):
    """Returns the address of the request slot's DRY record (int32: number of tokens, header, tokens); null if the
    request does not use DRY."""
    return tl.load((settings + DRY).to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.int32))


@triton.jit
def note_in_record(settings, token):
    """Appends the token (int32) to the request slot's DRY record, if it has one with room for it."""
    if tl.load((settings + DRY).to(tl.pointer_type(tl.int64))) != 0:
        record = dry_record(settings)
        n = tl.load(record)
        if n < tl.load(settings + DRY_ROOM):
            tl.store(record + HEADER + n, token)
            tl.store(record, n + 1)


@triton.jit
def ends_in_breaker(tokens, n, mask, VOCAB: tl.constexpr):
    """Returns 1 if the last of n > 0 tokens completes a DRY sequence breaker, else 0. mask: int32, a bit for each of
    VOCAB tokens that is a breaker by itself, then the longer breakers, each ended by a negative number."""
    last = tl.load(tokens + n - 1)
    found = (tl.load(mask + last // 32) >> (last % 32)) & 1
    at = mask + (VOCAB + 31) // 32
    while tl.load(at) >= 0:
        length = 0
        while tl.load(at + length) >= 0:
            length += 1
        equal = (n >= length).to(tl.int32)
        if n >= length:
            for i in range(length):
                equal &= (tl.load(at + i) == tl.load(tokens + n - length + i)).to(tl.int32)
        found |= equal
        at += length + 1
    return found


@kernel
def dry_kernel(slots, count, settings, repeats, VOCAB: tl.constexpr):
    """Updates the DRY record of each row's request slot to the slot's tokens. A program per row below count[0]. Writes
    to repeats int32 [n, VOCAB], initially zero, for each token that would continue a repetition: 1 + the exponent of
    the base in its penalty."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count):
        return
    settings += tl.load(slots + row).to(tl.int64) * WORDS
    record = dry_record(settings)
    if tl.load((settings + DRY).to(tl.pointer_type(tl.int64))) == 0:
        return
    tokens = record + HEADER
    runs = tokens + tl.load(settings + DRY_ROOM)
    mask = runs + tl.load(settings + DRY_ROOM)
    n = tl.load(record)
    last = tl.load(tokens + n - 1, n > 0, -1)
    if tl.load(record + 1) < n:
        for start in range(0, n - 1, TILE):
            lag = start + 1 + tl.arange(0, TILE)
            same = tl.load(tokens + n - 1 - lag, lag < n, -1) == last
            tl.store(runs + lag, tl.where(same, tl.load(runs + lag, lag < n, 0) + 1, 0), lag < n)
        unbroken = tl.where(ends_in_breaker(tokens, n, mask, VOCAB) != 0, 0, tl.load(record + 2) + 1)
        tl.store(record + 2, unbroken)
        tl.store(record + 1, n)
    tl.debug_barrier()
    last_n = tl.load(settings + PENALTY_LAST_N)
    window = tl.where(last_n < 0, n, tl.minimum(n, last_n))
    allowed = tl.load(settings + ALLOWED_LENGTH)
    limit = tl.load(record + 2)
    if window > allowed:
        for start in range(0, window - 1, TILE):
            lag = start + 1 + tl.arange(0, TILE)
            live = lag < window
            run = tl.minimum(tl.minimum(tl.load(runs + lag, live, 0), limit), window - lag)
            token = tl.load(tokens + n - lag, live, 0)
            is_breaker = ((tl.load(mask + token // 32, live, 0) >> (token % 32)) & 1) != 0
            longer = live & (run >= allowed) & ~is_breaker
            tl.atomic_max(repeats + row * VOCAB + token, run - allowed + 1, mask=longer)
