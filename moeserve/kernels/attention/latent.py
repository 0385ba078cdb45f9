"""Latent attention in absorbed form (https://arxiv.org/abs/2405.04434): many heads attend to one vector per token,
whose first part is also the value. For decode rows, with keys split over programs, and for prefill chunks.

A program processes some heads of a row, or of a tile of rows, as one block of query rows, so that each loaded key
serves all of them, in the scores and as a value. The latent and the rotated part of a key are loaded and multiplied
separately: together they would have to be padded to a power of two.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def combine(part_sums, part_stats, at, splits, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Combines the partial results of `splits` splits, from part `at` on, into one normalised [ROWS, SIZE]."""
    m, d = tl.arange(0, ROWS), tl.arange(0, SIZE)
    acc = tl.zeros([ROWS, SIZE], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    whole = tl.zeros([ROWS], tl.float32)
    for j in range(splits):
        part = (at + j) * ROWS + m
        largest = tl.load(part_stats + part * 2, cache_modifier=".cg")
        total = tl.load(part_stats + part * 2 + 1, cache_modifier=".cg")
        sums = tl.load(part_sums + part[:, None] * SIZE + d[None, :], cache_modifier=".cg")
        new = tl.maximum(top, largest)
        shrink, share = tl.exp2(top - new), tl.exp2(largest - new)
        acc = acc * shrink[:, None] + sums * share[:, None]
        whole = whole * shrink + total * share
        top = new
    return acc / whole[:, None]


@kernel
def latent_attention_kernel(
    q, rotated, keys, table, tiles, req_slots, positions, count, part_sums, part_stats, counters, out,
    TABLE_STRIDE: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, RANK_SIZE: tl.constexpr, ROTARY_SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of G heads, SPLITS), or without SPLITS (tiles, blocks of G heads).

    q [n, HEADS, RANK] and rotated [n, HEADS, ROTARY], scaled; keys [slots, RANK + ROTARY], of the same dtype; out
    [n, HEADS, RANK]. Row i < count[0] attends to the slots table[req_slots[i], : positions[i] + 1]. With tiles
    int32 [tiles, 4] (first row, rows, its position, request slot), each row of a tile attends up to its own
    position. part_sums [n, blocks, SPLITS, ROWS, RANK_SIZE] and part_stats [.., 2] float32: scratch; counters int32
    [n, blocks]: zero before and after. LEAST: minimum of blocks of BLOCK keys per split. ROWS: a power of two that
    holds a tile's rows times G; *_SIZE: powers of two that hold RANK and ROTARY.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tiles is None:
        i = tl.program_id(0)
        if i >= tl.load(count):
            return
        row, rows = i, 1
        start, req_slot = tl.load(positions + i), tl.load(req_slots + i)
    else:
        # A sequence's last tiles have the most keys, so they start first.
        tile = tiles + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4
        row, rows, start, req_slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    block, split = tl.program_id(1), tl.program_id(2)
    end = start + rows
    per = tl.maximum(tl.cdiv(tl.cdiv(end, BLOCK), SPLITS), LEAST) * BLOCK
    splits = tl.cdiv(end, per)
    if split >= splits:
        return
    m, d, e = tl.arange(0, ROWS), tl.arange(0, RANK_SIZE)[None, :], tl.arange(0, ROTARY_SIZE)[None, :]
    head = block * G + m % G
    live = ((m // G < rows) & (head < HEADS))[:, None]
    at = ((row + m // G).to(tl.int64) * HEADS + head)[:, None]
    query = tl.load(q + at * RANK + d, live & (d < RANK), 0.0)
    query_rotated = tl.load(rotated + at * ROTARY + e, live & (e < ROTARY), 0.0)
    # Rows beyond the tile attend to the keys of its last row, so that no row has no keys.
    position = start + tl.minimum(m // G, rows - 1)
    held = table + req_slot.to(tl.int64) * TABLE_STRIDE
    acc = tl.zeros([ROWS, RANK_SIZE], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    last = tl.minimum(end, (split + 1) * per)
    for first in range(split * per, last, BLOCK):
        p = first + tl.arange(0, BLOCK)
        there = p < last
        slot = (tl.load(held + p, there, 0).to(tl.int64) * (RANK + ROTARY))[:, None]
        k = tl.load(keys + slot + d, there[:, None] & (d < RANK), 0.0)
        k_rotated = tl.load(keys + slot + RANK + e, there[:, None] & (e < ROTARY), 0.0)
        scores = tl.dot(query_rotated, tl.trans(k_rotated))
        scores = tl.dot(query, tl.trans(k), scores) * LOG2E
        seen = there[None, :] & (p[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(largest - new)
        acc = tl.dot(weights.to(k.dtype), k, acc * shrink[:, None])
        total = total * shrink + tl.sum(weights, 1)
        largest = new
    to = out + at * RANK + d
    if splits == 1:
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), live & (d < RANK))
    elif SPLITS > 1:
        place = row * tl.num_programs(1) + block
        part = (place * SPLITS + split) * ROWS + m
        tl.store(part_sums + part[:, None] * RANK_SIZE + d, acc)
        tl.store(part_stats + part * 2, largest)
        tl.store(part_stats + part * 2 + 1, total)
        tl.debug_barrier()  # all threads must have written before the counter says so
        arrived = tl.atomic_add(counters + place, 1, sem="acq_rel")
        if arrived == splits - 1:
            tl.store(counters + place, 0)
            result = combine(part_sums, part_stats, place * SPLITS, splits, ROWS, RANK_SIZE)
            tl.store(to, result.to(out.dtype.element_ty), live & (d < RANK))
