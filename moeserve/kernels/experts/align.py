"""Sorts routes by expert into blocks of one expert each, the input of the grouped products.

With few routes there is one program per expert, and every program counts all routes: no atomics, no second launch, a
fixed order. With many routes count_kernel counts each once, and place_kernel finds its place.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def places(routes, TOP_K: tl.constexpr, STRIDE: tl.constexpr):
    """Returns the memory offset (in elements) of each of `routes`, where route row * TOP_K + j lies at row * STRIDE +
    j."""
    if STRIDE != TOP_K:
        routes = routes // TOP_K * STRIDE + routes % TOP_K
    return routes


@kernel
def align_kernel(
    ids, count, block_expert, block_routes,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr, E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sorts the routes by expert into blocks of BLOCK routes, a program per expert. Grid (EXPERTS). ids int32 [n,
    TOP_K], rows STRIDE apart; negative ids, and rows from count[0] on, have no route.

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


@kernel
def count_kernel(
    ids, count, counts,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, STRIDE: tl.constexpr, CHUNK: tl.constexpr, E: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Counts routes: counts int32 [chunks, E], for each CHUNK routes the number of routes to each expert; column E -
    1: of routes without an expert. Grid (chunks). Other arguments as for align_kernel."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    r = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + places(r, TOP_K, STRIDE), r < tl.load(count) * TOP_K, -1)
    is_one = (expert >= 0) & (expert < EXPERTS)
    tl.store(
        counts + tl.program_id(0) * E + tl.arange(0, E), tl.histogram(tl.where(is_one, expert, E - 1), E)
    )


@triton.jit
def summed_counts(counts, chunk, CHUNKS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr):
    """Returns how many routes each expert has [E], and how many of them are in chunks before `chunk`; ROWS chunks at
    once."""
    e = tl.arange(0, E)
    total = tl.zeros([E], tl.int32)
    before = tl.zeros([E], tl.int32)
    for first in range(0, CHUNKS, ROWS):
        c = first + tl.arange(0, ROWS)
        some = tl.load(counts + c[:, None] * E + e[None, :], (c < CHUNKS)[:, None], 0)
        total += tl.sum(some, 0)
        before += tl.sum(tl.where((c < chunk)[:, None], some, 0), 0)
    return total, before


@kernel
def place_kernel(
    ids, count, counts, block_expert, block_routes,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes what align_kernel computes, from the counts of count_kernel. Grid (CHUNKS + EXPERTS): CHUNKS
    programs, each of which places the routes of one chunk; then EXPERTS programs, each of which writes one expert's id
    for its blocks, and -1 into the rest of its last block; the last program also writes -1 for unused blocks. ROWS:
    chunks whose counts are summed at once."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0)
    e = tl.arange(0, E)
    total, before = summed_counts(counts, chunk, CHUNKS, E, ROWS)
    blocks = tl.where(e < EXPERTS, (total + BLOCK - 1) // BLOCK, 0)
    if chunk < CHUNKS:
        places_before = (tl.cumsum(blocks, 0) - blocks) * BLOCK + before
        r = chunk * CHUNK + tl.arange(0, CHUNK)
        routes = tl.load(count) * TOP_K
        expert = tl.load(ids + places(r, TOP_K, STRIDE), r < routes, -1)
        live = (expert >= 0) & (expert < EXPERTS)
        place = tl.gather(places_before, tl.where(live, expert, 0), 0)
        for first in range(0, CHUNK, 32):
            other = chunk * CHUNK + first + tl.arange(0, 32)
            its = tl.load(ids + places(other, TOP_K, STRIDE), other < routes, -1)
            is_before = (its[None, :] == expert[:, None]) & (other[None, :] < r[:, None])
            place += tl.sum(is_before.to(tl.int32), 1)
        tl.store(block_routes + place, r, live)
    else:
        mine = chunk - CHUNKS
        first_block = tl.sum(tl.where(e < mine, blocks, 0), 0)
        own = tl.sum(tl.where(e == mine, blocks, 0), 0)
        done = first_block * BLOCK + tl.sum(tl.where(e == mine, total, 0), 0)
        end = first_block + own
        for b in range(first_block, end):
            tl.store(block_expert + b, mine)
        rest = done + tl.arange(0, BLOCK)
        tl.store(block_routes + rest, -1, rest < end * BLOCK)
        if mine == EXPERTS - 1:
            for first in range(end, BLOCKS, CHUNK):
                unused = first + tl.arange(0, CHUNK)
                tl.store(block_expert + unused, -1, unused < BLOCKS)
