"""Prefill attention over KV in slots of one token: chunks of many sequences in one launch, cached prefixes included.

A program takes a tile of BT consecutive rows of one sequence with all heads of a KV head, as one block of
BT * (heads / KV heads) query rows (flash attention 2: https://arxiv.org/abs/2307.08691). Keys before the tile need no
mask; those within it do.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.attention.decode import cap_scores
from moeserve.kernels.launch import kernel
from moeserve.kernels.quantize.kv_triton import from_halves, load_kv

LOG2E = tl.constexpr(1.4426950408889634)
NO_SCORE = tl.constexpr(-1e30)  # less than any score


@triton.jit
def attend_block(
    acc, largest, total, q, q_position, q_last, keys, values, key_scales, value_scales, table, first, end,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, V_DIM: tl.constexpr, V_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Attends to the BLOCK keys from position `first` on, and returns (acc, largest, total) with them: the weighted sum
    of values float32 [rows, V_SIZE], and the maximum and the sum float32 [rows] of the online softmax.

    MASKED: whether some keys must be masked: keys after q_last (the last position that a row sees), past `end`, or
    WINDOW or more positions before the row. SCALE: of scores, for powers of two.
    """
    position = first + tl.arange(0, BLOCK)
    if MASKED:
        live = position < end
        slot = tl.load(table + position, live, 0).to(tl.int64)
    else:
        live = tl.full([BLOCK], True, tl.int1)
        slot = tl.load(table + position).to(tl.int64)
    k = load_kv(keys, key_scales, slot * (KV_HEADS * DIM), live, DIM, BLOCK, SIZE, False, False)
    scores = tl.dot(q, tl.trans(k))
    if CAP > 0:  # of scores before SCALE, which is positive
        scores = cap_scores(scores, CAP / SCALE)
    if MASKED:
        scores = tl.where(position[None, :] <= q_last[:, None], scores, float("-inf"))
        if WINDOW > 0:
            scores = tl.where(position[None, :] > q_position[:, None] - WINDOW, scores, float("-inf"))
    tl.static_assert(SCALE > 0)
    new = tl.maximum(largest, tl.max(scores, 1) * SCALE)
    if WINDOW > 0:
        new = tl.maximum(new, NO_SCORE)  # a row may see none of its tile's first keys
    weights = tl.exp2(scores * SCALE - new[:, None])  # a single instruction
    shrink = tl.exp2(largest - new)
    v = load_kv(values, value_scales, slot * (KV_HEADS * V_DIM), live, V_DIM, BLOCK, V_SIZE, False, True)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, new, total * shrink + tl.sum(weights, 1)


@kernel
def prefill_kernel(
    q, keys, values, key_scales, value_scales, sinks, table, tiles, ends, out,
    TABLE_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    WINDOW: tl.constexpr, SCALE: tl.constexpr, SIZE: tl.constexpr, V_SIZE: tl.constexpr, BT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Computes causal attention of tiles of prompt rows to all keys up to each row, and writes `out`. Grid (tiles, KV
    heads). tiles int32 [tiles, 4]: first row, rows (at most BT), its position, request slot.

    q [n, HEADS, DIM], scaled; keys [slots, KV_HEADS, DIM], values [slots, KV_HEADS, V_DIM] of q's type, or with scales
    [.., DIM / 32], [.., V_DIM / 32] (quantize/kv.py); out [n, HEADS * V_DIM].
    sinks, WINDOW, SCALE and CAP as in decode.py. ends int32 [n], optional, with a WINDOW: row i sees the positions
    below ends[i].
    ROWS, SIZE, V_SIZE: powers of two not below BT * HEADS / KV_HEADS, DIM and V_DIM.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    # A sequence's last tiles have the most keys, so they start first.
    tile = tiles + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4
    h = tl.program_id(1)
    row, rows, start, req_slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    m, d = tl.arange(0, ROWS), tl.arange(0, SIZE)
    live = (m // group < rows)[:, None] & (d < DIM)[None, :]
    at = (row + m // group).to(tl.int64) * (HEADS * DIM) + (h * group + m % group) * DIM
    query = tl.load(q + at[:, None] + d[None, :], live, 0.0)
    # Rows beyond the tile attend to the keys of its last row, so that no row has no keys.
    position = start + tl.minimum(m // group, rows - 1)
    last, end = position, start + rows
    if ends is not None:
        last = tl.load(ends + row + tl.minimum(m // group, rows - 1), rows > 0, 0) - 1
        end = tl.max(last, 0) + 1
    table += req_slot.to(tl.int64) * TABLE_STRIDE
    acc = tl.zeros([ROWS, V_SIZE], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + h * group + m % group) * LOG2E
        total += 1.0
    keys += h * DIM
    values += h * V_DIM
    if key_scales is not None:
        scale_of: tl.constexpr = DIM if keys.dtype.element_ty == tl.float8e4nv else 32
        key_scales += h * (DIM // scale_of)
        value_scales += h * (V_DIM // (V_DIM if scale_of == DIM else 32))
    unmasked = (start + 1) // BLOCK * BLOCK
    if WINDOW > 0:  # every block has keys that some row does not see
        unmasked = tl.maximum(start - WINDOW + 1, 0) // BLOCK * BLOCK
    else:
        for first in range(0, unmasked, BLOCK):
            acc, largest, total = attend_block(
                acc, largest, total, query, position, last, keys, values, key_scales, value_scales, table, first, 0,
                KV_HEADS, DIM, SIZE, V_DIM, V_SIZE, BLOCK, False, 0, SCALE, CAP,
            )  # fmt: skip
    for first in range(unmasked, end, BLOCK):
        acc, largest, total = attend_block(
            acc, largest, total, query, position, last, keys, values, key_scales, value_scales, table, first, end,
            KV_HEADS, DIM, SIZE, V_DIM, V_SIZE, BLOCK, True, WINDOW, SCALE, CAP,
        )  # fmt: skip
    result = acc / total[:, None]
    if value_scales is not None:
        result = from_halves(result)
    c = tl.arange(0, V_SIZE)
    to = (row + m // group).to(tl.int64) * (HEADS * V_DIM) + (h * group + m % group) * V_DIM
    live = (m // group < rows)[:, None] & (c < V_DIM)[None, :]
    tl.store(out + to[:, None] + c[None, :], result.to(out.dtype.element_ty), live)
