"""Index keys, index queries and their scores on a GPU: `reference.py` and `blocks.py` have the arithmetic."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def rotate(value, partner, angles, cos, sin, d, ROTARY: tl.constexpr):
    """Returns the numbers d of a head after RoPE, from the two numbers `value` and `partner` whose places
    `own_and_partner` names; numbers from ROTARY on are unchanged. cos, sin: float32 tables; angles: offset of the
    position's row in them, the position times ROTARY / 2."""
    half: tl.constexpr = ROTARY // 2
    turns = d < ROTARY
    c, s = tl.load(cos + angles + d % half, turns, 1.0), tl.load(sin + angles + d % half, turns, 0.0)
    return value * c + tl.where(d < half, -partner, partner) * s


@triton.jit
def own_and_partner(d, ROTARY: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Returns two indices in the shape of d: which number of the head RoPE puts at place d, and which number rotates
    with it. IN_PAIRS: RoPE rotates neighbours 2 i and 2 i + 1; the rotated head still has them in split halves.
    Otherwise number d rotates with number d + ROTARY / 2."""
    half: tl.constexpr = ROTARY // 2
    if IN_PAIRS:
        own = tl.where(d < ROTARY, 2 * (d % half) + d // half, d)
        other = own ^ 1
    else:
        own = d
        other = tl.where(d < half, d + half, d - half)
    return own, tl.where(d < ROTARY, other, d)


@kernel
def index_store_kernel(
    q, keys, norm, bias, cos, sin, positions, slots, count, queries, index_keys,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    IN_PAIRS: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes the rotated index queries of rows i < count[0], and stores their index keys, the rotated LayerNorm of
    keys. Grid (n, HEADS + 1): programs (i, 0 .. HEADS - 1) have the heads of row i, (i, HEADS) its key.

    q [n, HEADS * DIM], keys [n, DIM], rows at their strides; norm, bias float32 [DIM]; cos, sin float32 [positions,
    ROTARY / 2]; queries [n, HEADS, DIM]; index_keys [slots, DIM]: row slots[i] is written unless slots[i] is negative.
    SIZE: a power of two that holds DIM.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, part = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    row, d = i.to(tl.int64), tl.arange(0, SIZE)
    live = d < DIM
    own, other = own_and_partner(d, ROTARY, IN_PAIRS)
    angles = tl.load(positions + i).to(tl.int64) * (ROTARY // 2)
    if part < HEADS:
        head = q + row * Q_STRIDE + part * DIM
        value = tl.load(head + own, live, 0.0).to(tl.float32)
        partner = tl.load(head + other, live, 0.0).to(tl.float32)
        turned = rotate(value, partner, angles, cos, sin, d, ROTARY)
        tl.store(queries + (row * HEADS + part) * DIM + d, turned.to(queries.dtype.element_ty), live)
    else:
        slot = tl.load(slots + i).to(tl.int64)
        if slot >= 0:
            key = keys + row * K_STRIDE
            value = tl.load(key + own, live, 0.0).to(tl.float32)
            partner = tl.load(key + other, live, 0.0).to(tl.float32)
            mean = tl.sum(value, 0) / DIM
            centred = tl.where(live, value - mean, 0.0)
            shrink = tl.rsqrt(tl.sum(centred * centred, 0) / DIM + EPS)
            value = centred * shrink * tl.load(norm + own, live, 0.0) + tl.load(bias + own, live, 0.0)
            partner = (partner - mean) * shrink * tl.load(norm + other, live, 0.0)
            partner += tl.load(bias + other, live, 0.0)
            turned = rotate(value, partner, angles, cos, sin, d, ROTARY)
            tl.store(index_keys + slot * DIM + d, turned.to(index_keys.dtype.element_ty), live)


@triton.jit
def load_index_keys(
    index_keys, table, req_slot, j, end, K_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the index keys [KEYS, SIZE] of a request's blocks j < end, each in the slot of the block's last token."""
    d, there = tl.arange(0, SIZE), j < end
    held = table + req_slot.to(tl.int64) * TABLE_STRIDE
    slot = tl.load(held + (j + 1) * BLOCK - 1, there, 0).to(tl.int64)
    return tl.load(
        index_keys + slot[:, None] * K_STRIDE + d[None, :], there[:, None] & (d < DIM)[None, :], 0.0
    )


@triton.jit
def weighted_scores(
    q, weights, row, k, W_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Returns a row's scores [KEYS] of the keys k: the sum of ReLU(query . key), weighted, over the heads."""
    d = tl.arange(0, SIZE)
    total = tl.zeros([k.shape[0]], tl.float32)
    for first in tl.static_range(0, HEADS, TOGETHER):
        h = first + tl.arange(0, TOGETHER)
        at = (row * HEADS + h) * DIM
        query = tl.load(q + at[:, None] + d[None, :], (h < HEADS)[:, None] & (d < DIM)[None, :], 0.0)
        products = tl.maximum(tl.dot(query, tl.trans(k)), 0.0)
        if weights is not None:
            products *= tl.load(weights + row * W_STRIDE + h, h < HEADS, 0.0).to(tl.float32)[:, None]
        total += tl.sum(products, 0)
    return total


@triton.jit
def request_of_rows(req_slots, first, rows, live):
    """Returns the request slot (int32) of row `first`, and whether all `rows` that are `live` belong to the same
    request."""
    one = tl.load(req_slots + first)
    requests = tl.load(req_slots + rows, live, one)
    return one, (tl.min(requests, 0) == one) & (tl.max(requests, 0) == one)


@kernel
def index_scores_kernel(
    q, weights, index_keys, table, req_slots, positions, count, first_row, scores,
    W_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, SCORES_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores the complete blocks of BLOCK keys up to each row's position, of rows first_row[0] + i < count[0] with
    more than TOP of them. Grid (groups of ROWS rows, programs that share their blocks).

    q [n, HEADS, DIM] and index_keys [slots, DIM], rows K_STRIDE apart, of one dtype; weights [n, HEADS], rows W_STRIDE
    apart, None: all 1; table int32 [requests, TABLE_STRIDE]; scores float32 [.., SCORES_STRIDE]: row i. SIZE, TOGETHER:
    powers of two that hold DIM, and the heads that are multiplied together."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    base, existing = tl.load(first_row), tl.load(count)
    first = base + tl.program_id(0) * ROWS
    if first >= existing:
        return
    r = first + tl.arange(0, ROWS)
    most = tl.max((tl.load(positions + r, r < existing, -1) + 1) // BLOCK, 0)
    if most <= TOP:
        return
    one, is_shared = request_of_rows(req_slots, first, r, r < existing)
    end = tl.minimum(first + ROWS, existing)
    for block in range(tl.program_id(1), tl.cdiv(most, KEYS), tl.num_programs(1)):
        j = block * KEYS + tl.arange(0, KEYS)
        to = scores + j
        if is_shared:  # as in a prompt: the keys serve all rows
            k = load_index_keys(index_keys, table, one, j, most, K_STRIDE, TABLE_STRIDE, DIM, SIZE, BLOCK)
            for i in range(end - first):
                row = first.to(tl.int64) + i
                found = weighted_scores(q, weights, row, k, W_STRIDE, HEADS, DIM, SIZE, TOGETHER)
                tl.store(to + (row - base) * SCORES_STRIDE, found, j < most)
        else:
            for i in range(end - first):
                row = first.to(tl.int64) + i
                mine = (tl.load(positions + row) + 1) // BLOCK
                k = load_index_keys(
                    index_keys,
                    table,
                    tl.load(req_slots + row),
                    j,
                    mine,
                    K_STRIDE,
                    TABLE_STRIDE,
                    DIM,
                    SIZE,
                    BLOCK,
                )
                found = weighted_scores(q, weights, row, k, W_STRIDE, HEADS, DIM, SIZE, TOGETHER)
                tl.store(to + (row - base) * SCORES_STRIDE, found, j < mine)
