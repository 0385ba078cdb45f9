"""Applies the samplers in the order that a request asks for. Each sampler drops some of the candidates, which stay in
id order.

`csrc/sampling/filters.cpp` is the same in C++. A program has a row; its candidates are compacted in place.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.sampling.columns import column
from moeserve.kernels.sampling.filter_and_draw import (
    LOWEST,
    MIN_P,
    TILE,
    TOP_K,
    TOP_P,
    WAYS,
    cut,
    draw,
    gather,
    key_of,
    kth_block,
    mass_from,
)
from moeserve.kernels.sampling.scan import TEMPERATURE, double_at, float_at
from moeserve.sampling.order import CODES

ORDER = column("order")
TOP_N_SIGMA = column("top_n_sigma")
TYPICAL_P = column("typical_p")
XTC_PROBABILITY = column("xtc_probability")
XTC_THRESHOLD = column("xtc_threshold")
DO_TEMPERATURE = tl.constexpr(CODES["temperature"])
DO_TOP_N_SIGMA = tl.constexpr(CODES["top_n_sigma"])
DO_TOP_K = tl.constexpr(CODES["top_k"])
DO_TYPICAL_P = tl.constexpr(CODES["typical_p"])
DO_MIN_P = tl.constexpr(CODES["min_p"])
DO_TOP_P = tl.constexpr(CODES["top_p"])
DO_XTC = tl.constexpr(CODES["xtc"])
LAST = tl.constexpr(2147483647)  # larger than every id


@triton.jit
def candidates_at(values, ids, start, n):
    i = start + tl.arange(0, TILE)
    return tl.load(values + i, i < n, float("-inf")), tl.load(ids + i, i < n, LAST), i < n


@triton.jit
def move_together(values, ids, to, value, token, kept):
    """Stores the entries of a tile that are `kept` at `to` and the following places: values float32, ids int32. Returns
    the place after them."""
    at = to + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.debug_barrier()  # the whole tile must have been read
    tl.store(values + at, value, kept)
    tl.store(ids + at, token, kept)
    return to + tl.sum(kept.to(tl.int32), 0)


@triton.jit
def keep_head(values, ids, n, key, limit):
    """Keeps, at the beginning of `values` and `ids`, the n candidates that are ranked above `key`, or equally with an
    id of at most `limit`. Returns their number (int32)."""
    kept = 0
    for start in range(0, n, TILE):
        value, token, live = candidates_at(values, ids, start, n)
        place = key_of(value)
        inside = live & ((place > key) | ((place == key) & (token <= limit)))
        kept = move_together(values, ids, kept, value, token, inside)
    tl.debug_barrier()
    return kept


@triton.jit
def keep_first(values, ids, n, target, top, scale, BY_MASS: tl.constexpr):
    """Keeps the shortest head of mass (or number) `target`, float64. Returns its number of candidates."""
    key, limit = tl.full([], LOWEST, tl.int32), tl.full([], LAST, tl.int32)
    key, limit = cut(values, ids, n, key, limit, target, top, scale, BY_MASS)
    return keep_head(values, ids, n, key, limit)


@triton.jit
def keep_from(values, ids, n, floor):
    """Keeps the candidates whose logit is at least `floor`, float64. Returns their number."""
    kept = 0
    for start in range(0, n, TILE):
        value, token, live = candidates_at(values, ids, start, n)
        kept = move_together(values, ids, kept, value, token, live & (value.to(tl.float64) >= floor))
    tl.debug_barrier()
    return kept


@triton.jit
def spread(values, ids, n):
    """Returns the standard deviation of the candidates' logits, float64."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, n, TILE):
        value, _, live = candidates_at(values, ids, start, n)
        total += tl.sum(tl.where(live, value, 0.0).to(tl.float64), 0)
    mean = total / n
    squares = tl.full([], 0.0, tl.float64)
    for start in range(0, n, TILE):
        value, _, live = candidates_at(values, ids, start, n)
        off = tl.where(live, value.to(tl.float64) - mean, 0.0)
        squares += tl.sum(off * off, 0)
    return tl.sqrt(squares / n)


@triton.jit
def expected(values, ids, n, top, scale):
    """Returns the expected logit minus `top`, and the candidates' mass, float64."""
    mass, total = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for start in range(0, n, TILE):
        value, _, live = candidates_at(values, ids, start, n)
        weight = tl.where(live, tl.exp((value - top) * scale), 0.0).to(tl.float64)
        mass += tl.sum(weight, 0)
        total += tl.sum(tl.where(live, weight * (value.to(tl.float64) - top.to(tl.float64)), 0.0), 0)
    return total / mass, mass


@triton.jit
def distance_key(value, top, center):
    """Returns an int32 that orders logits by their distance from the expected logit; the nearest has the smallest. top:
    the row's largest logit; center: the expected logit minus `top`, float64."""
    distance = tl.abs((value.to(tl.float64) - top.to(tl.float64)) - center).to(tl.float32)
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def near_masses(values, ids, n, pivots, top, scale, center):
    """Returns float64 [WAYS]: for each pivot, the mass of the candidates whose distance key is at most the pivot."""
    mass = tl.zeros([TILE, WAYS], tl.float32)
    for start in range(0, n, TILE):
        value, _, live = candidates_at(values, ids, start, n)
        weight = tl.where(live, tl.exp((value - top) * scale), 0.0)
        near = distance_key(value, top, center)[:, None] <= pivots[None, :]
        mass += tl.where(near, weight[:, None], 0.0)
    return tl.sum(mass.to(tl.float64), 0)


@triton.jit
def typical_p(values, ids, n, share, top, scale):
    """Keeps the candidates whose logit is nearest to the expected one, until their probabilities add up to `share` of
    all (typical sampling, https://arxiv.org/abs/2202.00666). Returns their number. scale: 1 / temperature; top: the
    largest logit."""
    center, mass = expected(values, ids, n, top, scale)
    target = share * mass
    low, high = tl.full([], 0, tl.int64), tl.full([], 0x7F800000, tl.int64)
    while low < high:  # finds the smallest key with enough mass; every pass narrows it WAYS + 1 times
        step = (high - low + WAYS) // (WAYS + 1)
        pivots = tl.minimum(low + step * tl.arange(0, WAYS), high).to(tl.int32)
        masses = near_masses(values, ids, n, pivots, top, scale, center)
        short = tl.sum((masses < target).to(tl.int32), 0)
        high = tl.where(short < WAYS, tl.minimum(low + step * short, high), high)
        low = tl.minimum(tl.where(short > 0, low + step * (short - 1) + 1, low), high)
    key = low.to(tl.int32)
    wanted = target - tl.max(
        near_masses(values, ids, n, key - 1 + tl.zeros([WAYS], tl.int32), top, scale, center), 0
    )
    kept = 0
    seen = tl.full([], 0.0, tl.float64)  # mass of the ties so far, lowest ids first
    for start in range(0, n, TILE):
        value, token, live = candidates_at(values, ids, start, n)
        place = distance_key(value, top, center)
        weight = tl.exp((value - top) * scale).to(tl.float64)
        tie = live & (place == key)
        ties = tl.where(tie, weight, 0.0)
        before = seen + tl.cumsum(ties, 0) - ties
        inside = live & ((place < key) | (tie & (before < wanted)))
        seen += tl.sum(ties, 0)
        kept = move_together(values, ids, kept, value, token, inside)
    tl.debug_barrier()
    return kept


@triton.jit
def xtc(values, ids, n, threshold, top, scale):
    """Applies XTC: drops all candidates whose probability is at least `threshold`, except the least likely of them (the
    highest id among equals). Returns the number of candidates kept. scale: 1 / temperature; top: the largest logit."""
    least = threshold * mass_from(values, ids, n, LOWEST, LAST, LOWEST, top, scale, True)
    lowest = tl.full([], float("inf"), tl.float32)
    count = 0
    for start in range(0, n, TILE):
        value, _, live = candidates_at(values, ids, start, n)
        likely = live & (tl.exp((value - top) * scale).to(tl.float64) >= least)
        lowest = tl.minimum(lowest, tl.min(tl.where(likely, value, float("inf")), 0))
        count += tl.sum(likely.to(tl.int32), 0)
    if count >= 2:
        spared = -1
        for start in range(0, n, TILE):
            value, token, live = candidates_at(values, ids, start, n)
            spared = tl.maximum(spared, tl.max(tl.where(live & (value == lowest), token, -1), 0))
        kept = 0
        for start in range(0, n, TILE):
            value, token, live = candidates_at(values, ids, start, n)
            likely = tl.exp((value - top) * scale).to(tl.float64) >= least
            kept = move_together(values, ids, kept, value, token, live & (~likely | (token == spared)))
        tl.debug_barrier()
        n = kept
    return n


@triton.jit
def largest(values, ids, n):
    found = tl.full([], float("-inf"), tl.float32)
    for start in range(0, n, TILE):
        value, _, _ = candidates_at(values, ids, start, n)
        found = tl.maximum(found, tl.max(value, 0))
    return found


@triton.jit
def chain_and_draw(
    x, settings, block_max, maxima, top, u, xtc_u, values, ids,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Draws a token (int32 id) of a row without NaN and +inf by applying the row's samplers in their order. x: float32
    [VOCAB]; top: its largest logit; u, xtc_u: random numbers from 0 up to 1, for the draw and for XTC."""
    order = tl.load(settings + ORDER)
    top_k = tl.load(settings + TOP_K)
    floor = tl.full([], float("-inf"), tl.float32)
    if ((order & 15) == DO_TOP_K) & (top_k <= BLOCKS):
        floor = kth_block(maxima, top_k)
    n = gather(x, block_max, floor.to(tl.float64), values, ids, VOCAB, BLOCK, BLOCKS)
    heat = tl.full([], 1.0, tl.float32)
    while order != 0:
        sampler = order & 15
        order = order >> 4
        scale = 1.0 / heat
        if sampler == DO_TEMPERATURE:
            temperature = float_at(settings, TEMPERATURE)
            if temperature == 0:
                n = keep_first(values, ids, n, tl.full([], 1.0, tl.float64), top, scale, False)
            else:
                heat = temperature
        elif sampler == DO_TOP_N_SIGMA:
            floor_64 = top.to(tl.float64) - double_at(settings, TOP_N_SIGMA) * spread(values, ids, n)
            n = keep_from(values, ids, n, floor_64)
        elif sampler == DO_TOP_K:
            if n > top_k:
                n = keep_first(values, ids, n, top_k.to(tl.float64), top, scale, False)
        elif sampler == DO_TYPICAL_P:
            n = typical_p(values, ids, n, double_at(settings, TYPICAL_P), top, scale)
            top = largest(values, ids, n)
        elif sampler == DO_MIN_P:
            floor_64 = top.to(tl.float64) + heat.to(tl.float64) * tl.log(double_at(settings, MIN_P))
            n = keep_from(values, ids, n, floor_64)
        elif sampler == DO_TOP_P:
            mass = mass_from(values, ids, n, LOWEST, LAST, LOWEST, top, scale, True)
            n = keep_first(values, ids, n, double_at(settings, TOP_P) * mass, top, scale, True)
        elif sampler == DO_XTC:
            threshold = double_at(settings, XTC_THRESHOLD)
            if (threshold <= 0.5) & (xtc_u < double_at(settings, XTC_PROBABILITY)):
                n = xtc(values, ids, n, threshold, top, scale)
                top = largest(values, ids, n)
    return draw(values, ids, n, LOWEST, LAST, u, top, 1.0 / heat)
