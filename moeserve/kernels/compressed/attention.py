"""Attention to compressed entries and to the tokens of a window, in Triton: `reference.attend` and `rotate_back`.

A program processes some heads of a single row, because neighbouring rows choose different entries. It loads each key
once for all of these heads.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.compressed.triton import key_row, rotate_pairs, sequence_of
from moeserve.kernels.launch import kernel

LOG2E = tl.constexpr(1.4426950408889634)


@kernel
def compressed_attention_kernel(
    q, keys, sinks, cos, sin, table, req_slots, positions, chosen, sequence, first, counts, slots, rings, count, out,
    TABLE_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, RATIO: tl.constexpr,
    TOP: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, G: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes compressed attention. Row i < count[0] attends to the entries of the complete blocks of RATIO tokens, in
    the KV slots of the blocks' last tokens; with TOP to at most TOP of them, the blocks chosen[i]. It also attends to
    the last WINDOW tokens, including its own. RATIO 0: there are no entries. The output is rotated back. Grid (n,
    blocks of G heads).

    q [n, HEADS, DIM], scaled, and keys [rows, DIM], of one dtype; sinks float32 [HEADS]; table int32 [requests,
    TABLE_STRIDE]; chosen int32 [n, WIDTH], from `indexer.op.choose`; out floats [n, HEADS, DIM]. SIZE: a power of two
    that holds DIM; BLOCK: keys at once. Other arguments as for `compressed_store_kernel`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    row, position = i.to(tl.int64), tl.load(positions + i)
    mine, of_first, step_first = sequence_of(sequence, first, positions, i)
    fits = (tl.load(counts + mine) <= RING - WINDOW + 1).to(tl.int32)
    slot = tl.load(slots + mine).to(tl.int64)
    ring_first, ring_end = tl.load(rings), tl.load(rings + 1)
    begin = tl.maximum(position - WINDOW + 1, 0)
    entries = position * 0
    if RATIO > 0:
        entries = (position + 1) // RATIO
        if TOP > 0:
            entries = tl.minimum(entries, TOP)
    end = entries + position + 1 - begin
    h, d = tl.program_id(1) * G + tl.arange(0, G), tl.arange(0, SIZE)[None, :]
    live = (h < HEADS)[:, None] & (d < DIM)
    at = (row * HEADS + h)[:, None] * DIM + d
    query = tl.load(q + at, live, 0.0)
    largest = tl.load(sinks + h, h < HEADS, 0.0) * LOG2E
    total = tl.full([G], 1.0, tl.float32)  # a sink counts, and has no value
    acc = tl.zeros([G, SIZE], tl.float32)
    held = table + tl.load(req_slots + i).to(tl.int64) * TABLE_STRIDE
    for j0 in range(0, end, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        there = j < end
        of_window = begin + tl.maximum(j - entries, 0)
        place = key_row(slot, of_first, of_window, step_first, fits, ring_first, ring_end, RING)
        if RATIO > 0:
            block = j
            if TOP > 0:
                block = tl.load(chosen + row * WIDTH + j, j < entries, 0)
            of_entry = tl.load(held + (block + 1) * RATIO - 1, j < entries, 0)
            place = tl.where(j < entries, of_entry.to(tl.int64), place)
        k = tl.load(keys + place[:, None] * DIM + d, there[:, None] & (d < DIM), 0.0)
        scores = tl.where(there[None, :], tl.dot(query, tl.trans(k)) * LOG2E, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - new[:, None]), tl.exp2(largest - new)
        acc = tl.dot(weights.to(k.dtype), k, acc * shrink[:, None])
        total = total * shrink + tl.sum(weights, 1)
        largest = new
    angles = position.to(tl.int64) * (ROTARY // 2)
    turned = rotate_pairs(acc / total[:, None], cos + angles, sin + angles, True, DIM, ROTARY, SIZE)
    tl.store(out + at, turned.to(out.dtype.element_ty), live)
