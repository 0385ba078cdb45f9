"""Attention of rows to chosen blocks of keys. A decode row's keys are split over programs, as in decode.py; a prompt
row's are not.

A program processes the query heads of one KV head of a single row, because neighbouring rows choose different blocks.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.attention.decode import attend, store_split
from moeserve.kernels.launch import kernel
from moeserve.kernels.quantize.kv_triton import from_halves, load_kv


@triton.jit
def load_chosen(
    keys, values, key_scales, value_scales, held, blocks, key, end, OF_BLOCK: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, V_DIM: tl.constexpr, V_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loads keys [BLOCK, SIZE] and values [BLOCK, V_SIZE] of the row's keys number `key` [BLOCK], zeros from `end` on.
    Values with scales are `by_halves`."""
    there = key < end
    position = tl.load(blocks + key // OF_BLOCK, there, 0) * OF_BLOCK + key % OF_BLOCK
    slot = tl.load(held + position, there, 0).to(tl.int64)
    k = load_kv(keys, key_scales, slot * (KV_HEADS * DIM), there, DIM, BLOCK, SIZE, False, False)
    return k, load_kv(
        values, value_scales, slot * (KV_HEADS * V_DIM), there, V_DIM, BLOCK, V_SIZE, False, True
    )


@kernel
def chosen_blocks_kernel(
    q, keys, values, key_scales, value_scales, table, req_slots, chosen, lasts, count, part_sums, part_stats, counters,
    out, codes, scales,
    TABLE_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, OF_BLOCK: tl.constexpr, SCALE: tl.constexpr, G: tl.constexpr,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes attention to chosen blocks of keys. Row i < count[0] attends to the first lasts[i] + 1 keys of the
    blocks chosen[i, c], which have OF_BLOCK keys each; c: its KV head if there are as many CHOICES, else 0. Grid (n,
    KV_HEADS, SPLITS).

    q [n, HEADS, DIM], scaled, in the dtype that keys are read as; keys [slots, KV_HEADS, DIM], values [slots, KV_HEADS,
    V_DIM], optionally with scales; table int32 [requests, TABLE_STRIDE]; chosen int32 [n, CHOICES, WIDTH]; lasts int32
    [n]. part_sums, part_stats, counters, out, codes, scales, SCALE, G, SIZE, V_SIZE and LEAST as in decode.py.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if i >= tl.load(count):
        return
    group: tl.constexpr = HEADS // KV_HEADS
    row, end = i.to(tl.int64), tl.load(lasts + i) + 1
    per = tl.maximum(tl.cdiv(tl.cdiv(end, BLOCK), SPLITS), LEAST) * BLOCK
    splits = tl.cdiv(end, per)
    if split >= splits:
        return
    g, d = tl.arange(0, G), tl.arange(0, SIZE)
    at = (row * HEADS + h * group + g) * DIM
    query = tl.load(q + at[:, None] + d[None, :], (g < group)[:, None] & (d < DIM)[None, :], 0.0)
    held = table + tl.load(req_slots + i).to(tl.int64) * TABLE_STRIDE
    blocks = chosen + (row * CHOICES + (h if CHOICES > 1 else 0)) * WIDTH
    keys += h * DIM
    values += h * V_DIM
    if key_scales is not None:
        scale_of: tl.constexpr = DIM if keys.dtype.element_ty == tl.float8e4nv else 32
        key_scales += h * (DIM // scale_of)
        value_scales += h * (V_DIM // (V_DIM if scale_of == DIM else 32))
    acc, total = tl.zeros([G, V_SIZE], tl.float32), tl.zeros([G, BLOCK], tl.float32)
    largest = tl.full([G], float("-inf"), tl.float32)
    last = tl.minimum(end, (split + 1) * per)
    for first in range(split * per, last, BLOCK):
        key = first + tl.arange(0, BLOCK)
        k, v = load_chosen(
            keys, values, key_scales, value_scales, held, blocks, key, last, OF_BLOCK, KV_HEADS, DIM, SIZE, V_DIM,
            V_SIZE, BLOCK,
        )  # fmt: skip
        acc, largest, total = attend(query, k, v, key < last, acc, largest, total, SCALE)
    whole = tl.sum(total, 1)
    if value_scales is not None:
        acc = from_halves(acc)
    store_split(
        acc, largest, whole, i, h, split, splits, part_sums, part_stats, counters, out, codes, scales, HEADS, KV_HEADS,
        V_DIM, SPLITS, G, V_SIZE,
    )  # fmt: skip
