"""Chooses a row's token from its blocks: thresholds by bisection over the floats' order, then a draw in id order.

The filters keep heads of one total order: falling logit, then ascending id (`csrc/sampling/sampling.h`). A head is
a Cut: the key of its last logit, and the largest id that stays among logits equal to that one.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.sampling.columns import column
from moeserve.kernels.sampling.scan import TEMPERATURE, double_at, float_at

TOP_K = column("top_k")
TOP_P = column("top_p")
MIN_P = column("min_p")

TILE = tl.constexpr(1024)  # candidates per iteration
WAYS = tl.constexpr(16)  # keys tried at a time
LOWEST = tl.constexpr(-2139095041)  # a key below that of every float except NaN


@triton.jit
def key_of(x):
    """Returns the rank of x among all floats, as int32; +0 and -0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -2147483648 - bits, bits)


@triton.jit
def kth_block(maxima, k):
    """Returns a value that at least k entries of the row reach: the k-th largest of the blocks' maxima [B], -inf if
    there are fewer blocks."""
    above = tl.sum((maxima[:, None] > maxima[None, :]).to(tl.int32), 0)
    kth = tl.min(tl.where(above < k, maxima, float("inf")), 0)
    return tl.where(tl.sum((maxima > float("-inf")).to(tl.int32), 0) >= k, kth, float("-inf"))


@triton.jit
def gather(x, block_max, floor, values, ids, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Writes the entries of row x that are >= floor (float64) and not -inf, in id order. Returns their number."""
    n = 0
    for block in range(BLOCKS):
        if tl.load(block_max + block).to(tl.float64) >= floor:
            c = block * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(x + c, c < VOCAB, float("-inf"))
            kept = (value.to(tl.float64) >= floor) & (value > float("-inf"))
            at = n + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(values + at, value, kept)
            tl.store(ids + at, c, kept)
            n += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()
    return n


@triton.jit
def load_tile(values, ids, start, n, key, limit):
    """Returns TILE candidates from `start` on: logits float32, ids int32, their keys by rank, and a mask of those that
    are among the n and in the head: ranked above `key`, or equally with an id of at most `limit`."""
    i = start + tl.arange(0, TILE)
    value = tl.load(values + i, i < n, float("-inf"))
    token = tl.load(ids + i, i < n, 2147483647)
    place = key_of(value)
    return value, token, place, (i < n) & ((place > key) | ((place == key) & (token <= limit)))


@triton.jit
def weight_of(value, top, scale, BY_MASS: tl.constexpr):
    return tl.exp((value - top) * scale) if BY_MASS else tl.full(value.shape, 1.0, tl.float32)


@triton.jit
def mass_from(values, ids, n, key, limit, least, top, scale, BY_MASS: tl.constexpr):
    """Returns the mass (or number) of a head's candidates whose key is at least `least`, float64."""
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, n, TILE):
        value, _, place, inside = load_tile(values, ids, start, n, key, limit)
        weight = tl.where(inside & (place >= least), weight_of(value, top, scale, BY_MASS), 0.0)
        mass += tl.sum(weight.to(tl.float64), 0)
    return mass


@triton.jit
def masses_from(values, ids, n, key, limit, pivots, top, scale, BY_MASS: tl.constexpr):
    """Returns the masses for WAYS keys at once: float64 [WAYS]."""
    mass = tl.zeros([TILE, WAYS], tl.float32)
    for start in range(0, n, TILE):
        value, _, place, inside = load_tile(values, ids, start, n, key, limit)
        weight = tl.where(inside, weight_of(value, top, scale, BY_MASS), 0.0)
        mass += tl.where(place[:, None] >= pivots[None, :], weight[:, None], 0.0)
    return tl.sum(mass.to(tl.float64), 0)


@triton.jit
def cut(values, ids, n, key, limit, target, top, scale, BY_MASS: tl.constexpr):
    """Returns (key, limit) of the shortest head, within the head (key, limit), whose mass is at least `target`; the
    same head if its mass is less. BY_MASS: the mass is the sum of exp((logit - top) * scale); else the number of
    candidates."""
    low = tl.full([], LOWEST, tl.int32).to(tl.int64)
    high = key_of(top).to(tl.int64)
    if mass_from(values, ids, n, key, limit, LOWEST, top, scale, BY_MASS) > target:
        while (
            low < high
        ):  # finds the largest key with enough mass above it; every pass narrows it WAYS + 1 times
            step = (high - low + WAYS) // (WAYS + 1)
            pivots = tl.minimum(low + step * (1 + tl.arange(0, WAYS)), high).to(tl.int32)
            masses = masses_from(values, ids, n, key, limit, pivots, top, scale, BY_MASS)
            enough = tl.sum((masses >= target).to(tl.int32), 0)
            beyond = low + step * (enough + 1) - 1
            low = tl.minimum(low + step * enough, high)
            high = tl.where(enough < WAYS, tl.minimum(beyond, high), high)
            high = tl.maximum(high, low)
        place = low.to(tl.int32)
        before = mass_from(values, ids, n, key, limit, place + 1, top, scale, BY_MASS)
        limit = last_tie(values, ids, n, key, limit, place, target - before, top, scale, BY_MASS)
        key = place
    return key, limit


@triton.jit
def last_tie(values, ids, n, key, limit, place, wanted, top, scale, BY_MASS: tl.constexpr):
    """Returns the id (int32) of the candidate at which the mass of the candidates with key `place`, lowest ids first,
    reaches `wanted`. Other arguments as in `cut`."""
    last = 2147483647
    seen = tl.full([], 0.0, tl.float64)
    for start in range(0, n, TILE):
        value, token, here, inside = load_tile(values, ids, start, n, key, limit)
        tie = inside & (here == place)
        weight = tl.where(tie, weight_of(value, top, scale, BY_MASS), 0.0).to(tl.float64)
        reached = tie & (seen + tl.cumsum(weight, 0) >= wanted)
        last = tl.minimum(last, tl.min(tl.where(reached, token, 2147483647), 0))
        seen += tl.sum(weight, 0)
    return tl.minimum(last, limit) if key == place else last


@triton.jit
def draw(values, ids, n, key, limit, u, top, scale):
    """Returns the first id (int32) of the head (key, limit) at which the running sum of probabilities exceeds u times
    their total. u: random number from 0 up to 1."""
    target = u * mass_from(values, ids, n, key, limit, LOWEST, top, scale, True)
    chosen = 2147483647
    last = -1
    seen = tl.full([], 0.0, tl.float64)
    for start in range(0, n, TILE):
        value, token, _, inside = load_tile(values, ids, start, n, key, limit)
        weight = tl.where(inside, weight_of(value, top, scale, True), 0.0).to(tl.float64)
        running = seen + tl.cumsum(weight, 0)
        chosen = tl.minimum(chosen, tl.min(tl.where((weight > 0) & (running > target), token, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, token, -1), 0))
        seen += tl.sum(weight, 0)
    return tl.minimum(chosen, last)  # by rounding, the target may lie beyond the total


@triton.jit
def draw_from_all(x, maxima, sums, u, top, scale, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """`draw` over a whole row: first the block, by the blocks' masses [B], then the token within it."""
    b = tl.arange(0, maxima.shape[0])
    mass = tl.where(maxima > float("-inf"), sums * tl.exp((maxima - top) * scale), 0.0).to(tl.float64)
    target = u * tl.sum(mass, 0)
    running = tl.cumsum(mass, 0)
    block = tl.min(tl.where((mass > 0) & (running > target), b, maxima.shape[0]), 0)
    block = tl.minimum(block, tl.max(tl.where(mass > 0, b, 0), 0))
    target -= tl.sum(tl.where(b < block, mass, 0.0), 0)
    c = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + c, c < VOCAB, float("-inf"))
    weight = tl.exp((value - top) * scale).to(tl.float64)
    chosen = tl.min(tl.where((weight > 0) & (tl.cumsum(weight, 0) > target), c, 2147483647), 0)
    return tl.minimum(chosen, tl.max(tl.where(weight > 0, c, -1), 0))


@triton.jit
def first_largest(x, maxima, top, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.arange(0, maxima.shape[0])
    c = tl.min(tl.where(maxima == top, b, maxima.shape[0]), 0) * BLOCK + tl.arange(0, BLOCK)
    return tl.min(tl.where(tl.load(x + c, c < VOCAB, float("-inf")) == top, c, 2147483647), 0)


@triton.jit
def filter_and_draw(
    x, settings, block_max, maxima, sums, top, u, values, ids,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    temperature = float_at(settings, TEMPERATURE)
    scale = 1.0 / temperature
    top_k, top_p, min_p = tl.load(settings + TOP_K), double_at(settings, TOP_P), double_at(settings, MIN_P)
    by_rank = (top_k > 0) & (top_k < VOCAB)
    token = -1
    if by_rank | (min_p > 0) | (top_p < 1):
        # Only by mass: tokens less likely than (1 - top_p) / vocabulary together have less than 1 - top_p (a
        # hundredth is left for rounding).
        mass = tl.sum(
            tl.where(maxima > float("-inf"), sums * tl.exp((maxima - top) * scale), 0.0).to(tl.float64), 0
        )
        least = tl.where(min_p > 0, min_p, tl.where(by_rank, 0.0, 0.99 * (1 - top_p) * mass / VOCAB))
        floor = top.to(tl.float64) + temperature.to(tl.float64) * tl.log(least)
        if by_rank:
            floor = tl.maximum(floor, kth_block(maxima, top_k).to(tl.float64) if top_k <= BLOCKS else floor)
        n = gather(x, block_max, floor, values, ids, VOCAB, BLOCK, BLOCKS)
        key, limit = tl.full([], LOWEST, tl.int32), 2147483647
        if by_rank & (n > top_k):
            key, limit = cut(values, ids, n, key, limit, top_k.to(tl.float64), top, scale, False)
        if top_p < 1:
            if by_rank | (min_p > 0):
                mass = mass_from(values, ids, n, key, limit, LOWEST, top, scale, True)
            key, limit = cut(values, ids, n, key, limit, top_p * mass, top, scale, True)
        token = draw(values, ids, n, key, limit, u, top, scale)
    else:
        token = draw_from_all(x, maxima, sums, u, top, scale, VOCAB, BLOCK)
    return token
