"""Decode attention: one query row a sequence, keys split over programs, in one launch.

The grid is fixed (rows, KV heads, SPLITS): which keys a program takes, and whether it takes any, follows on the device
from the row's position, so a CUDA graph replays at any length (flash-decoding: https://pytorch.org/blog/flash-decoding).
The last split of a row to finish adds the parts up: an atomic counter that it sets back to 0.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.quantize.triton import quantize_groups


@triton.jit
def attend(
    q,
    keys,
    values,
    table,
    start,
    end,
    KV_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head group q [G, SIZE] over positions start .. end - 1. keys, values: pointers to the KV head.

    Gives the unnormalised sum [G, SIZE], the largest score and the sum of the weights, [G], in powers of two.
    """
    d = tl.arange(0, SIZE)
    acc = tl.zeros(q.shape, tl.float32)
    largest = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    for first in range(start, end, BLOCK):
        position = first + tl.arange(0, BLOCK)
        live = position < end
        slot = tl.load(table + position, live, 0).to(tl.int64) * KV_STRIDE
        here = live[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + slot[:, None] + d[None, :], here, 0.0)
        v = tl.load(values + slot[:, None] + d[None, :], here, 0.0)
        scores = tl.dot(q, tl.trans(k)) * 1.4426950408889634
        scores = tl.where(live[None, :], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        largest = new
    return acc, largest, total


@triton.jit
def combine(
    part_sums,
    part_stats,
    at,
    splits,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The parts of `splits` splits, from part `at` on, as one normalised [G, SIZE], four at a time."""
    g, d = tl.arange(0, G), tl.arange(0, SIZE)
    s = tl.arange(0, SPLITS)
    stat = part_stats + ((at + s[:, None]) * G + g[None, :]) * 2
    live = (s < splits)[:, None]
    largest = tl.load(stat, live, float("-inf"), cache_modifier=".cg")
    total = tl.load(stat + 1, live, 0.0, cache_modifier=".cg")
    top = tl.max(largest, 0)
    whole = tl.sum(total * tl.exp2(largest - top[None, :]), 0)
    acc = tl.zeros([G, SIZE], tl.float32)
    for first in range(0, splits, 4):
        for j in tl.static_range(4):  # their loads are on their way together
            part = (at + first + j) * G + g
            here = (first + j < splits) & (g < HEADS)
            stats = tl.load(part_stats + part * 2, here, float("-inf"), cache_modifier=".cg")
            from_sums = part_sums + part[:, None] * SIZE + d[None, :]
            sums = tl.load(from_sums, here[:, None], 0.0, cache_modifier=".cg")
            acc += sums * tl.exp2(stats - top)[:, None]
    return acc / whole[:, None]


@triton.jit
def store_heads(
    result,
    out,
    codes,
    scales,
    at,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    G: tl.constexpr,
    SIZE: tl.constexpr,
):
    """result [G, SIZE]: HEADS heads of DIM, to column `at` on, as floats and as int8, where given."""
    g, d = tl.arange(0, G)[:, None], tl.arange(0, SIZE)[None, :]
    live = (g < HEADS) & (d < DIM)
    if out is not None:
        tl.store(out + at + g * DIM + d, result.to(out.dtype.element_ty), live)
    if codes is not None:
        groups: tl.constexpr = SIZE // 32
        q, s = quantize_groups(tl.reshape(result, [G * groups, 32]))
        n = tl.arange(0, G * groups)
        column = n // groups * DIM + n % groups * 32
        live = (n // groups < HEADS) & (n % groups * 32 < DIM)
        tl.store(codes + at + column[:, None] + tl.arange(0, 32)[None, :], q, live[:, None])
        tl.store(scales + (at + column) // 32, s, live)


@kernel
def decode_kernel(
    q, keys, values, table, req_slots, positions, count, part_sums, part_stats, counters, out, codes, scales,
    TABLE_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, G: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, KV heads, SPLITS). Row i attends to the slots table[req_slots[i], : positions[i] + 1].

    q [n, HEADS, DIM], scaled; keys, values [slots, KV_HEADS, DIM] of q's type. part_sums [n, KV_HEADS, SPLITS, G, SIZE]
    and part_stats [.., 2] float32: room; counters int32 [n, KV_HEADS]: zeros before and after.
    out [n, HEADS * DIM] and codes, scales: the result, where given. G, SIZE: powers of two that hold a group, a head.
    A split has LEAST blocks of keys or more.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    existing, position, req_slot = tl.load(count), tl.load(positions + i), tl.load(req_slots + i)
    if i >= existing:
        return
    length = position + 1
    per = tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK), SPLITS), LEAST) * BLOCK
    splits = tl.cdiv(length, per)
    if split >= splits:
        return
    g, d = tl.arange(0, G), tl.arange(0, SIZE)
    head = i.to(tl.int64) * (HEADS * DIM) + h * (group * DIM)
    mine = q + head + g[:, None] * DIM + d[None, :]
    query = tl.load(mine, (g < group)[:, None] & (d < DIM)[None, :], 0.0)
    slots = table + req_slot.to(tl.int64) * TABLE_STRIDE
    end = tl.minimum(length, (split + 1) * per)
    acc, largest, total = attend(
        query, keys + h * DIM, values + h * DIM, slots, split * per, end, KV_HEADS * DIM, DIM, SIZE, BLOCK
    )
    if splits == 1:
        store_heads(acc / total[:, None], out, codes, scales, head, group, DIM, G, SIZE)
    else:
        at = (i.to(tl.int64) * KV_HEADS + h) * SPLITS
        part = (at + split) * G + g
        tl.store(part_sums + part[:, None] * SIZE + d[None, :], acc, (g < group)[:, None])
        tl.store(part_stats + part * 2, largest)
        tl.store(part_stats + part * 2 + 1, total)
        tl.debug_barrier()  # every thread's part is written before the count says so
        arrived = tl.atomic_add(counters + i * KV_HEADS + h, 1, sem="acq_rel")
        if arrived == splits - 1:
            tl.store(counters + i * KV_HEADS + h, 0)
            result = combine(part_sums, part_stats, at, splits, group, G, SIZE, SPLITS)
            store_heads(result, out, codes, scales, head, group, DIM, G, SIZE)
