"""Logprobs from raw logits: a given token's and the most likely ones', using the blocks that `scan.py` has
summarised."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import kernel
from moeserve.kernels.sampling.filter_and_draw import TILE, gather, kth_block


@triton.jit
def rank_of(x, block_max, value, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Returns 1 + the number of logits of the float32 row x [VOCAB] that are larger than `value`. block_max: maximum of
    each of BLOCKS blocks of BLOCK logits."""
    larger = 0
    for block in range(BLOCKS):
        if tl.load(block_max + block) > value:
            c = block * BLOCK + tl.arange(0, BLOCK)
            larger += tl.sum((tl.load(x + c, c < VOCAB, float("-inf")) > value).to(tl.int32), 0)
    return larger + 1


@triton.jit
def next_largest(values, ids, n, bound, bound_id):
    """Returns the logit (float32) and the id (int32) of the candidate after (bound, bound_id), by falling logit, then
    ascending id; -inf and -1 if there is none."""
    best, best_id = tl.full([], float("-inf"), tl.float32), -1
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        value = tl.load(values + i, i < n, float("-inf"))
        token = tl.load(ids + i, i < n, 2147483647)
        after = (i < n) & ((value < bound) | ((value == bound) & (token > bound_id)))
        largest = tl.max(tl.where(after, value, float("-inf")), 0)
        if largest > best:
            best = largest
            best_id = tl.min(tl.where(after & (value == largest), token, 2147483647), 0)
    return best, best_id


@kernel
def logprobs_kernel(
    x, targets, count, block_max, block_sum, values, ids, logprobs, ranks, top_ids, top_logprobs,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr, TOP_N: tl.constexpr,
):  # fmt: skip
    """Computes natural log-softmax of each row of x float32 [n, VOCAB], which scan_kernel has scanned without slots. A
    program per row below count[0].

    Writes logprobs float32 [n] and ranks int32 [n] of targets int32 [n]: rank 0 if the row is not finite or the
    target is no token. top_ids int32, top_logprobs float32 [n, TOP_N]: the most likely tokens, lower ids first
    among equals, -1 beyond the last. values float32, ids int32 [n, VOCAB]: scratch for candidates.
    """
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count):
        return
    x += row * VOCAB
    values += row * VOCAB
    ids += row * VOCAB
    b = tl.arange(0, B)
    maxima = tl.load(block_max + row * BLOCKS + b, b < BLOCKS, float("-inf"))
    sums = tl.load(block_sum + row * BLOCKS + b, b < BLOCKS, 0.0)
    top = tl.max(maxima, 0)
    target = tl.load(targets + row)
    tl.store(ranks + row, 0)
    if (top < float("inf")) & (top > float("-inf")) & (target >= 0) & (target < VOCAB):
        mass = tl.sum(tl.where(maxima > float("-inf"), sums * tl.exp(maxima - top), 0.0).to(tl.float64), 0)
        log_sum = top.to(tl.float64) + tl.log(mass)
        value = tl.load(x + target)
        tl.store(logprobs + row, (value.to(tl.float64) - log_sum).to(tl.float32))
        tl.store(ranks + row, rank_of(x, block_max + row * BLOCKS, value, VOCAB, BLOCK, BLOCKS))
        if TOP_N > 0:
            floor = kth_block(maxima, TOP_N).to(tl.float64) if TOP_N <= BLOCKS else float("-inf")
            n = gather(x, block_max + row * BLOCKS, floor, values, ids, VOCAB, BLOCK, BLOCKS)
            bound, bound_id = tl.full([], float("inf"), tl.float32), -1
            for j in range(TOP_N):
                bound, bound_id = next_largest(values, ids, n, bound, bound_id)
                tl.store(top_ids + row * TOP_N + j, bound_id)
                tl.store(top_logprobs + row * TOP_N + j, (bound.to(tl.float64) - log_sum).to(tl.float32))
