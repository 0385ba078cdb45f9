"""Attention residuals in Triton: `attended.py` has the arithmetic.

A row has STREAMS vectors of HIDDEN numbers, one after another, and is one program's.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.norm.triton import store_norm
from moeserve.kernels.streams.sinkhorn_triton import block_output


@kernel
def attend_streams_kernel(
    x, parts, part_weights, part_ids, extra, place, rows, score, reading, norm, count, y, codes, scales, exact,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, P: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes x[i, s] = block[i] (`block_output`) or x[i, s] + block[i]; then y[i] = RMSNorm(a weighted sum of
    x[rows[i]]'s first streams) * norm. Grid (m), for rows i < count[0].

    x float32 [n, STREAMS * HIDDEN]; parts to extra: see `block_output`; place, reading: int32 [3], a `StreamReading`:
    of the block, for s and whether x[i, s] is replaced (None: x is not changed), and of y, for the number of streams;
    score, norm float32 [HIDDEN]; None: only x is written. rows int32 [m], without a place; None: row i. y, codes with
    scales, exact float32: [m, HIDDEN], each optional. SIZE: HIDDEN or the power of two above."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    out = i.to(tl.int64)
    row = out
    if rows is not None:
        row = tl.load(rows + i).to(tl.int64)
    c = tl.arange(0, SIZE)
    live = c < HIDDEN
    at = x + row * STREAMS * HIDDEN + c
    into = -1
    changed = tl.zeros([SIZE], tl.float32)
    if place is not None:
        into = tl.load(place + 1)
        begins = tl.load(place + 2) != 0
        changed = tl.load(at + into * HIDDEN, live & (not begins), 0.0)
        changed += block_output(parts, part_weights, part_ids, extra, row, c, live, HIDDEN, P, SIZE)
        tl.store(at + into * HIDDEN, changed, live)
    if score is not None:
        of_score = tl.load(score + c, live, 0.0)
        most, total = float("-inf"), 0.0
        mixed = tl.zeros([SIZE], tl.float32)
        for s in range(tl.load(reading)):
            value = tl.load(at + s * HIDDEN, live & (s != into), 0.0)
            value = tl.where(s == into, changed, value)
            logit = tl.sum(value * of_score, 0) * tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + EPS)
            highest = tl.maximum(most, logit)
            before, share = tl.exp(most - highest), tl.exp(logit - highest)
            mixed = mixed * before + share * value
            total = total * before + share
            most = highest
        gain = tl.load(norm + c, live, 0.0)
        store_norm(mixed / total, gain, y, codes, scales, exact, out, HIDDEN, EPS, SIZE)
