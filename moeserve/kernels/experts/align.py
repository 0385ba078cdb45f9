"""Sorts routes by expert into blocks of one expert each, the input of the grouped products.

There is one program per expert, and every program counts all routes: no atomics, no second launch, a fixed order.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def places(routes, TOP_K: tl.constexpr, STRIDE: tl.constexpr):
    """Returns the memory offsets of routes row * TOP_K + j, for rows that are STRIDE apart."""
    if STRIDE != TOP_K:
        routes = routes // TOP_K * STRIDE + routes % TOP_K
    return routes


@kernel
def align_kernel(
    ids, count, block_expert, block_routes,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr, E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (EXPERTS). ids int32 [n, TOP_K], rows STRIDE apart; negative ids, and rows from count[0] on, have no
    route.

    block_expert int32 [BLOCKS]: each block's expert, -1 for unused blocks; block_routes int32 [BLOCKS, BLOCK]: its
    routes (row * TOP_K + j), ascending, -1 where it is not full. E: a power of two above EXPERTS; CHUNK: routes per
    pass.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    mine = tl.program_id(0)
    routes = tl.load(count) * TOP_K
    e = tl.arange(0, E)
    counts = tl.zeros([E], tl.int32)
    for first in range(0, routes, CHUNK):
        r = first + tl.arange(0, CHUNK)
        expert = tl.load(ids + places(r, TOP_K, STRIDE), r < routes, -1)
        is_one = (expert >= 0) & (expert < EXPERTS)
        counts += tl.histogram(tl.where(is_one, expert, E - 1), E)  # E - 1 stands for no expert
    blocks = tl.where(e < EXPERTS, (counts + BLOCK - 1) // BLOCK, 0)
    before = tl.sum(tl.where(e < mine, blocks, 0), 0)
    own = tl.sum(tl.where(e == mine, blocks, 0), 0)
    for b in range(before, before + own):
        tl.store(block_expert + b, mine)
    done = before * BLOCK
    for first in range(0, routes, CHUNK):
        r = first + tl.arange(0, CHUNK)
        hit = tl.load(ids + places(r, TOP_K, STRIDE), r < routes, -1) == mine
        rank = tl.cumsum(hit.to(tl.int32), 0)
        tl.store(block_routes + done + rank - 1, r, hit)
        done += tl.sum(hit.to(tl.int32), 0)
    rest = tl.arange(0, BLOCK)
    tl.store(block_routes + done + rest, -1, done + rest < (before + own) * BLOCK)
    if mine == EXPERTS - 1:
        for first in range(before + own, BLOCKS, CHUNK):
            unused = first + tl.arange(0, CHUNK)
            tl.store(block_expert + unused, -1, unused < BLOCKS)
