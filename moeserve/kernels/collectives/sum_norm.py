"""The all-reduce fused with the following norm: one launch; the sum does not pass through memory.

Each row has one program on each GPU (several if a router's product follows the norm), which sends its GPU's partial
sum to the others and waits for theirs. Few rows are sent as words, more as rows.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.collectives.rows import send_row, sum_rows
from moeserve.kernels.collectives.words import send_words, sum_words
from moeserve.kernels.launch import kernel
from moeserve.kernels.norm.triton import store_norm
from moeserve.kernels.routing.norm_router import store_logits


@kernel
def sum_norm_kernel(
    own, inbox, flags, peers, peer_flags, calls, x, attended, count, weight, y, codes, scales, exact,
    COLS: tl.constexpr, CAPACITY: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    POLLS: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums all GPUs' partial sums `own`, adds them and `attended` to x [n, COLS] in place, then stores the norm of x as
    norm.triton.add_norm_kernel does. A program per row i < count[0].

    own floats [n, COLS]; attended float32 [n, COLS], optional. inbox, peers: in rows.py's form with flags for ROWS
    rows, or in words.py's if flags is None; CAPACITY numbers. calls int32 [rows]: how often each row has been
    summed. A program sends before it waits, and every GPU starts its programs in the same order, so the programs
    that a row waits for are always among the first unfinished ones. count and weight are read before the previous
    kernel has ended.
    """
    if PDL:
        gdc_launch_dependents()
    i = tl.program_id(0)
    existing = tl.load(count)
    c = tl.arange(0, SIZE)
    live = c < COLS
    gain = tl.load(weight + c, live, 0.0)
    if PDL:
        gdc_wait()
    if i >= existing:
        return
    call = tl.load(calls + i) + 1
    at = i.to(tl.int64) * COLS + c
    partial = tl.load(own + at, live, 0.0)
    if flags is None:
        partial = partial.to(tl.float32)
        send_words(partial, call, peers, at, live, RANK, RANKS, CAPACITY)
    else:
        send_row(partial, call, peers, peer_flags, i, at, live, RANK, RANKS, CAPACITY, ROWS)
    value = tl.load(x + at, live, 0.0)
    if attended is not None:
        value += tl.load(attended + at, live, 0.0)
    if flags is None:
        value += sum_words(partial, call, inbox, at, live, RANK, RANKS, CAPACITY, POLLS)
    else:
        value += sum_rows(partial, call, inbox, flags, i, at, live, RANK, RANKS, CAPACITY, ROWS, POLLS)
    tl.store(x + at, value, live)
    store_norm(value, gain, y, codes, scales, exact, i.to(tl.int64), COLS, EPS, SIZE)
    tl.store(calls + i, call)


@kernel
def sum_norm_router_kernel(
    own, inbox, peers, calls, x, total, count, weight, router, bias, y, codes, scales, logits,
    COLS: tl.constexpr, CAPACITY: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, POLLS: tl.constexpr,
    EXPERTS: tl.constexpr, SIZE: tl.constexpr, BE: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes total = the sum of all GPUs' own, float32 [n, COLS] each, for rows below count[0]; then as
    routing.norm_router.norm_router_kernel with that total. Grid (rows, EXPERTS in tiles of BE).

    The programs of the first tile send a row, and those of all tiles wait for it. The first tile's come first in
    the grid, so that they run even while others wait. calls int32 [rows, tiles]: how often each program has run."""
    if PDL:
        gdc_launch_dependents()
    row, tile = tl.program_id(0), tl.program_id(1)
    i = row.to(tl.int64)
    c, e = tl.arange(0, SIZE), tile * BE + tl.arange(0, BE)
    live = c < COLS
    existing = tl.load(count)
    w = tl.load(router + e[:, None] * COLS + c[None, :], (e < EXPERTS)[:, None] & live[None, :], 0.0)
    gain = tl.load(weight + c, live, 0.0)
    if PDL:
        gdc_wait()
    if i >= existing:
        return
    counter = calls + row * tl.num_programs(1) + tile
    call = tl.load(counter) + 1
    at = i * COLS + c
    partial = tl.load(own + at, live, 0.0)
    if tile == 0:
        send_words(partial, call, peers, at, live, RANK, RANKS, CAPACITY)
    value = tl.load(x + at, live, 0.0)
    added = sum_words(partial, call, inbox, at, live, RANK, RANKS, CAPACITY, POLLS)
    if tile == 0:
        tl.store(total + at, added, live)
    store_logits(value + added, w, gain, bias, logits, i, tile, COLS, EXPERTS, SIZE, BE, EPS)
    if tile == 0:
        store_norm(value + added, gain, y, codes, scales, None, i, COLS, EPS, SIZE)
    tl.store(counter, call)
