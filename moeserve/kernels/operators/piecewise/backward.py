"""Gradients of piecewise attention without atomic additions (flash attention 2: https://arxiv.org/abs/2307.08691):
one kernel for keys and values, with a tile of keys per program, and one for queries.

Attention weights are recomputed from the forward pass's logsumexp. As in the forward pass, blocks that are wholly on
one side of the distance need only one product for their scores.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import Kernel
from moeserve.kernels.operators.piecewise.forward import LOG2E, load_rows, piece_scores


@triton.jit
def score_gradients(
    q1, q2, k1, k2, v, gradient, lse, delta, position, rows, row_live, n, distance,
    NEAR: tl.constexpr, FAR: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Returns the weights of a tile [queries, keys], and the gradient of its scores before scaling."""
    scores = piece_scores(q1, q2, k1, k2, position, rows, distance, NEAR, FAR) * SCALE
    seen = row_live[:, None] & (rows < n)[None, :]
    if CAUSAL:
        seen = seen & (rows[None, :] <= position[:, None])
    weights = tl.where(seen, tl.exp2((scores - lse[:, None]) * LOG2E), 0.0)
    of_weights = tl.dot(gradient, tl.trans(v), input_precision="tf32x3")
    return weights, weights * (of_weights - delta[:, None]) * SCALE


@triton.jit
def choose(gradients, position, rows, distance, of_far: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr):
    """Returns the score gradients (float32 tile [queries, keys]) with zeros for pairs whose key is not on the wanted
    side: at least `distance` before the query if of_far, else nearer. A tile without both sides (NEAR and FAR) is
    returned as it is."""
    if NEAR and FAR:
        is_far = position[:, None] - rows[None, :] >= distance
        gradients = tl.where(is_far, gradients, 0.0) if of_far else tl.where(is_far, 0.0, gradients)
    return gradients


@triton.jit
def add_key_gradients(
    dk1, dk2, dv, key1, key2, value, q1, q2, gradient, lse, delta, first, m, n, rows, distance,
    DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Returns (dk1, dk2, dv), float32 gradients of a tile of keys and values, with the contributions of BLOCK queries
    from `first` on added."""
    row = first + tl.arange(0, BLOCK)
    live, position = row < m, row + n - m
    query1 = load_rows(q1, row, m, DIM, SIZE, True) if NEAR else 0
    query2 = load_rows(q2, row, m, DIM, SIZE, True) if FAR else 0
    out_gradient = load_rows(gradient, row, m, DIM, SIZE, True)
    weights, of_scores = score_gradients(
        query1, query2, key1, key2, value, out_gradient, tl.load(lse + row, live, 0.0), tl.load(delta + row, live, 0.0),
        position, rows, live, n, distance, NEAR, FAR, CAUSAL, SCALE,
    )  # fmt: skip
    dv = tl.dot(tl.trans(weights.to(value.dtype)), out_gradient, dv, input_precision="tf32x3")
    if NEAR:
        of_near = choose(of_scores, position, rows, distance, False, NEAR, FAR).to(value.dtype)
        dk1 = tl.dot(tl.trans(of_near), query1, dk1, input_precision="tf32x3")
    if FAR:
        of_far = choose(of_scores, position, rows, distance, True, NEAR, FAR).to(value.dtype)
        dk2 = tl.dot(tl.trans(of_far), query2, dk2, input_precision="tf32x3")
    return dk1, dk2, dv


def piecewise_keys_kernel(
    q1, k1, q2, k2, v, gradient, lse, delta, dk1, dk2, dv, m, n, distance,
    GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (key tiles, batch * KV heads): gradients of ROWS keys and values, from BLOCK queries at a time."""
    first_key = tl.program_id(0) * ROWS
    kv_head = tl.program_id(1)
    of_keys = kv_head.to(tl.int64) * n
    rows = first_key + tl.arange(0, ROWS)
    key1 = load_rows(k1 + of_keys * DIM, rows, n, DIM, SIZE, True)
    key2 = load_rows(k2 + of_keys * DIM, rows, n, DIM, SIZE, True)
    value = load_rows(v + of_keys * DIM, rows, n, DIM, SIZE, True)
    acc1 = tl.zeros([ROWS, SIZE], tl.float32)
    acc2 = tl.zeros([ROWS, SIZE], tl.float32)
    acc = tl.zeros([ROWS, SIZE], tl.float32)
    # Query rows at which: a key is first seen; some keys are first far; all keys are far.
    begin = tl.maximum(first_key - (n - m), 0) // BLOCK * BLOCK if CAUSAL else 0
    mixed = tl.maximum(first_key + distance - (n - m), 0) // BLOCK * BLOCK
    mixed = tl.minimum(tl.maximum(mixed, begin), tl.cdiv(m, BLOCK) * BLOCK)
    far = tl.cdiv(tl.maximum(first_key + ROWS - 1 + distance - (n - m), 0), BLOCK) * BLOCK
    far = tl.minimum(tl.maximum(far, mixed), tl.cdiv(m, BLOCK) * BLOCK)
    for g in range(GROUP):
        head = kv_head * GROUP + g
        of_queries = head.to(tl.int64) * m
        of1, of2 = q1 + of_queries * DIM, q2 + of_queries * DIM
        of_gradient = gradient + of_queries * DIM
        for first in range(begin, mixed, BLOCK):
            acc1, acc2, acc = add_key_gradients(
                acc1, acc2, acc, key1, key2, value, of1, of2, of_gradient, lse + of_queries, delta + of_queries, first,
                m, n, rows, distance, DIM, SIZE, BLOCK, True, False, CAUSAL, SCALE,
            )  # fmt: skip
        for first in range(mixed, far, BLOCK):
            acc1, acc2, acc = add_key_gradients(
                acc1, acc2, acc, key1, key2, value, of1, of2, of_gradient, lse + of_queries, delta + of_queries, first,
                m, n, rows, distance, DIM, SIZE, BLOCK, True, True, CAUSAL, SCALE,
            )  # fmt: skip
        for first in range(far, m, BLOCK):
            acc1, acc2, acc = add_key_gradients(
                acc1, acc2, acc, key1, key2, value, of1, of2, of_gradient, lse + of_queries, delta + of_queries, first,
                m, n, rows, distance, DIM, SIZE, BLOCK, False, True, CAUSAL, SCALE,
            )  # fmt: skip
    d = tl.arange(0, SIZE)
    at = (of_keys + rows)[:, None] * DIM + d[None, :]
    live = (rows < n)[:, None] & (d < DIM)[None, :]
    tl.store(dk1 + at, acc1.to(dk1.dtype.element_ty), live)
    tl.store(dk2 + at, acc2.to(dk2.dtype.element_ty), live)
    tl.store(dv + at, acc.to(dv.dtype.element_ty), live)


@triton.jit
def add_query_gradients(
    dq1, dq2, query1, query2, out_gradient, sums, differences, k1, k2, v, first, n, position, live, distance,
    DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Returns (dq1, dq2), float32 gradients of a tile of queries, with the contributions of BLOCK keys from `first` on
    added."""
    rows = first + tl.arange(0, BLOCK)
    key1 = load_rows(k1, rows, n, DIM, SIZE, True) if NEAR else 0
    key2 = load_rows(k2, rows, n, DIM, SIZE, True) if FAR else 0
    value = load_rows(v, rows, n, DIM, SIZE, True)
    _, of_scores = score_gradients(
        query1, query2, key1, key2, value, out_gradient, sums, differences, position, rows, live, n, distance, NEAR,
        FAR, CAUSAL, SCALE,
    )  # fmt: skip
    if NEAR:
        of_near = choose(of_scores, position, rows, distance, False, NEAR, FAR).to(value.dtype)
        dq1 = tl.dot(of_near, key1, dq1, input_precision="tf32x3")
    if FAR:
        of_far = choose(of_scores, position, rows, distance, True, NEAR, FAR).to(value.dtype)
        dq2 = tl.dot(of_far, key2, dq2, input_precision="tf32x3")
    return dq1, dq2


def piecewise_queries_kernel(
    q1, k1, q2, k2, v, gradient, lse, delta, dq1, dq2, m, n, distance,
    GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, batch * heads): gradients of ROWS queries, from BLOCK keys at a time."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head = tl.program_id(1)
    of_queries = head.to(tl.int64) * m
    of_keys = (head // GROUP).to(tl.int64) * n * DIM
    k1, k2, v = k1 + of_keys, k2 + of_keys, v + of_keys
    row = first_row + tl.arange(0, ROWS)
    live, position = row < m, row + n - m
    query1 = load_rows(q1 + of_queries * DIM, row, m, DIM, SIZE, True)
    query2 = load_rows(q2 + of_queries * DIM, row, m, DIM, SIZE, True)
    out_gradient = load_rows(gradient + of_queries * DIM, row, m, DIM, SIZE, True)
    sums = tl.load(lse + of_queries + row, live, 0.0)
    differences = tl.load(delta + of_queries + row, live, 0.0)
    acc1 = tl.zeros([ROWS, SIZE], tl.float32)
    acc2 = tl.zeros([ROWS, SIZE], tl.float32)
    last = tl.minimum(first_row + ROWS, m) - 1 + n - m
    end = tl.maximum(tl.minimum(n, last + 1), 0) if CAUSAL else n
    far_end = tl.maximum(tl.minimum(n, first_row + n - m - distance + 1), 0) // BLOCK * BLOCK
    mixed_end = tl.cdiv(tl.maximum(last - distance + 1, 0), BLOCK) * BLOCK
    mixed_end = tl.minimum(tl.maximum(mixed_end, far_end), tl.cdiv(end, BLOCK) * BLOCK)
    for first in range(0, far_end, BLOCK):
        acc1, acc2 = add_query_gradients(
            acc1, acc2, query1, query2, out_gradient, sums, differences, k1, k2, v, first, n, position, live, distance,
            DIM, SIZE, BLOCK, False, True, CAUSAL, SCALE,
        )  # fmt: skip
    for first in range(far_end, mixed_end, BLOCK):
        acc1, acc2 = add_query_gradients(
            acc1, acc2, query1, query2, out_gradient, sums, differences, k1, k2, v, first, n, position, live, distance,
            DIM, SIZE, BLOCK, True, True, CAUSAL, SCALE,
        )  # fmt: skip
    for first in range(mixed_end, end, BLOCK):
        acc1, acc2 = add_query_gradients(
            acc1, acc2, query1, query2, out_gradient, sums, differences, k1, k2, v, first, n, position, live, distance,
            DIM, SIZE, BLOCK, True, False, CAUSAL, SCALE,
        )  # fmt: skip
    d = tl.arange(0, SIZE)
    at = (of_queries + row)[:, None] * DIM + d[None, :]
    stored = live[:, None] & (d < DIM)[None, :]
    tl.store(dq1 + at, acc1.to(dq1.dtype.element_ty), stored)
    tl.store(dq2 + at, acc2.to(dq2.dtype.element_ty), stored)


_LENGTHS = ["m", "n", "distance"]
keys_kernel = Kernel(triton.jit(piecewise_keys_kernel, do_not_specialize=_LENGTHS))
queries_kernel = Kernel(triton.jit(piecewise_queries_kernel, do_not_specialize=_LENGTHS))
