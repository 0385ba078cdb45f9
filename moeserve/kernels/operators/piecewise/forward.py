"""Piecewise attention, forward (flash attention 2: https://arxiv.org/abs/2307.08691); a program takes a tile of
queries of one head.

Its keys are four ranges: keys beyond the distance for every row, and keys within it for every row, need one
product; blocks in between need both products and choose; the last ones are masked.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import Kernel

LOG2E = tl.constexpr(1.4426950408889634)
NO_SCORE = tl.constexpr(-1e30)  # less than any score


@triton.jit
def load_rows(base, rows, limit, DIM: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Returns [rows, SIZE] of a matrix [limit, DIM]; zeros outside it."""
    d = tl.arange(0, SIZE)
    at = base + rows[:, None] * DIM + d[None, :]
    if MASKED or DIM < SIZE:
        return tl.load(at, (rows < limit)[:, None] & (d < DIM)[None, :], 0.0)
    return tl.load(at)


@triton.jit
def piece_scores(q1, q2, k1, k2, position, rows, distance, NEAR: tl.constexpr, FAR: tl.constexpr):
    """Returns q k^T, float32 [queries, keys], for queries at `position` and keys at positions `rows`: of q1 and k1 for
    pairs nearer than `distance`, of q2 and k2 for the others."""
    if NEAR and FAR:
        near, far = (
            tl.dot(q1, tl.trans(k1), input_precision="tf32x3"),
            tl.dot(q2, tl.trans(k2), input_precision="tf32x3"),
        )
        scores = tl.where(position[:, None] - rows[None, :] >= distance, far, near)
    elif NEAR:
        scores = tl.dot(q1, tl.trans(k1), input_precision="tf32x3")
    else:
        scores = tl.dot(q2, tl.trans(k2), input_precision="tf32x3")
    return scores


@triton.jit
def attend_block(
    acc, largest, total, q1, q2, k1, k2, v, position, first, n, distance,
    DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Attends to BLOCK keys from position `first` on, and returns (acc, largest, total) with them: the weighted sum of
    values, the maximum and the sum of the online softmax, float32. MASKED: some keys are past the end n or, if CAUSAL,
    after a row's position."""
    rows = first + tl.arange(0, BLOCK)
    x1 = load_rows(k1, rows, n, DIM, SIZE, MASKED) if NEAR else 0
    x2 = load_rows(k2, rows, n, DIM, SIZE, MASKED) if FAR else 0
    scores = piece_scores(q1, q2, x1, x2, position, rows, distance, NEAR, FAR) * (SCALE * LOG2E)
    if MASKED:
        seen = (rows < n)[None, :]
        if CAUSAL:
            seen = seen & (rows[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    shrink = tl.exp2(largest - new)
    value = load_rows(v, rows, n, DIM, SIZE, MASKED)
    acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="tf32x3")
    return acc, new, total * shrink + tl.sum(weights, 1)


def piecewise_forward_kernel(
    q1, k1, q2, k2, v, out, lse, m, n, distance,
    GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MIXED: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Computes piecewise attention and its logsumexp: writes `out` and `lse`. Grid (query tiles, batch * heads).
    Arguments are `op.forward`'s, contiguous; GROUP: query heads per KV head; BLOCK: keys at a time; MIXED: keys at a
    time where both products are needed, a divisor of BLOCK."""
    # The last tiles see the most keys: they start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head = tl.program_id(1)
    of_queries = head.to(tl.int64) * m
    of_keys = (head // GROUP).to(tl.int64) * n * DIM
    k1, k2, v = k1 + of_keys, k2 + of_keys, v + of_keys
    row = first_row + tl.arange(0, ROWS)
    query1 = load_rows(q1 + of_queries * DIM, row, m, DIM, SIZE, True)
    query2 = load_rows(q2 + of_queries * DIM, row, m, DIM, SIZE, True)
    start = first_row + n - m
    position = row + n - m
    last = tl.minimum(first_row + ROWS, m) - 1 + n - m
    acc = tl.zeros([ROWS, SIZE], tl.float32)
    largest = tl.full([ROWS], NO_SCORE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    end = tl.maximum(tl.minimum(n, last + 1), 0) if CAUSAL else n
    whole = tl.maximum(tl.minimum(n, start + 1), 0) if CAUSAL else n
    far_end = tl.maximum(tl.minimum(n, start - distance + 1), 0) // BLOCK * BLOCK
    mixed_end = tl.cdiv(tl.maximum(last - distance + 1, 0), BLOCK) * BLOCK
    mixed_end = tl.minimum(tl.maximum(mixed_end, far_end), tl.cdiv(end, BLOCK) * BLOCK)
    near_end = tl.maximum(whole // BLOCK * BLOCK, mixed_end)
    for first in range(0, far_end, BLOCK):
        acc, largest, total = attend_block(
            acc, largest, total, query1, query2, k1, k2, v, position, first, n, distance, DIM, SIZE, BLOCK, False, True,
            False, CAUSAL, SCALE,
        )  # fmt: skip
    for first in tl.range(far_end, mixed_end, MIXED, num_stages=1):
        acc, largest, total = attend_block(
            acc, largest, total, query1, query2, k1, k2, v, position, first, n, distance, DIM, SIZE, MIXED, True, True,
            True, CAUSAL, SCALE,
        )  # fmt: skip
    for first in range(mixed_end, near_end, BLOCK):
        acc, largest, total = attend_block(
            acc, largest, total, query1, query2, k1, k2, v, position, first, n, distance, DIM, SIZE, BLOCK, True, False,
            False, CAUSAL, SCALE,
        )  # fmt: skip
    for first in range(near_end, end, BLOCK):
        acc, largest, total = attend_block(
            acc, largest, total, query1, query2, k1, k2, v, position, first, n, distance, DIM, SIZE, BLOCK, True, False,
            True, CAUSAL, SCALE,
        )  # fmt: skip
    some = total > 0.0  # whether the row sees any key
    result = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    d = tl.arange(0, SIZE)
    live = row < m
    at = out + (of_queries + row)[:, None] * DIM + d[None, :]
    tl.store(at, result.to(out.dtype.element_ty), live[:, None] & (d < DIM)[None, :])
    sums = tl.where(some, (largest + tl.log2(tl.where(some, total, 1.0))) / LOG2E, float("-inf"))
    tl.store(lse + of_queries + row, sums, live)


forward_kernel = Kernel(triton.jit(piecewise_forward_kernel, do_not_specialize=["m", "n", "distance"]))
