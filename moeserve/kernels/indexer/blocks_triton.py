"""Index keys, index queries and scores of indexers that choose blocks, on a GPU: `blocks.py` has the arithmetic."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.indexer.triton import own_and_partner, request_of_rows, rotate
from moeserve.kernels.launch import kernel
from moeserve.kernels.rope.triton import section_positions


@triton.jit
def normed_and_rotated(
    x, partner, norm, angles, cos, sin, d, other, DIM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr
):
    """Returns the numbers d of a head of DIM numbers in float32, divided by their root mean square, times `norm`, and
    with the first ROTARY rotated as halves. partner: the head's numbers `other`, each of which rotates with number d;
    angles: see `row_angles`."""
    live = d < DIM
    shrink = tl.rsqrt(tl.sum(x * x, 0) / DIM + EPS)
    value = x * shrink * tl.load(norm + d, live, 0.0)
    partner *= shrink * tl.load(norm + other, live, 0.0)
    return rotate(value, partner, angles, cos, sin, d, ROTARY)


@triton.jit
def row_angles(
    position, rotary, i, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TIME: tl.constexpr, ROTARY: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Returns the first angle of the position, or [SIZE]: of each number's. rotary: int32 [n, 3], of which row i has
    what the numbers rotate by (see `section_positions`); None: position."""
    if rotary is None:
        by = position.to(tl.int64)
    else:
        by = tl.reshape(
            section_positions(rotary + i.to(tl.int64) * 3, HEIGHT, WIDTH, TIME, ROTARY, SIZE), [SIZE]
        )
    return by * (ROTARY // 2)


@kernel
def block_index_kernel(
    q, keys, q_norm, k_norm, cos, sin, positions, rotary, slots, count, queries, index_keys,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    EPS: tl.constexpr, OF_TOKENS: tl.constexpr, SIZE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    TIME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes the normalised and rotated index queries of rows i < count[0], and stores their index keys: with OF_TOKENS
    normalised and rotated, else unchanged, for `complete_blocks_kernel`. Grid (n, HEADS + 1): programs (i, 0 .. HEADS -
    1) have the heads of row i, (i, HEADS) its key.

    q_norm, k_norm float32 [DIM]; rotary, HEIGHT, WIDTH, TIME: see `row_angles`; other arguments as for
    `index_store_kernel`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, part = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    row, d = i.to(tl.int64), tl.arange(0, SIZE)
    angles = row_angles(tl.load(positions + i), rotary, i, HEIGHT, WIDTH, TIME, ROTARY, SIZE)
    live = d < DIM
    _, other = own_and_partner(d, ROTARY, False)
    if part < HEADS:
        head = q + row * Q_STRIDE + part * DIM
        x = tl.load(head + d, live, 0.0).to(tl.float32)
        partner = tl.load(head + other, live, 0.0).to(tl.float32)
        x = normed_and_rotated(x, partner, q_norm, angles, cos, sin, d, other, DIM, ROTARY, EPS)
        tl.store(queries + (row * HEADS + part) * DIM + d, x.to(queries.dtype.element_ty), live)
    else:
        slot = tl.load(slots + i).to(tl.int64)
        if slot >= 0:
            key = keys + row * K_STRIDE
            x = tl.load(key + d, live, 0.0).to(tl.float32)
            if OF_TOKENS:
                partner = tl.load(key + other, live, 0.0).to(tl.float32)
                x = normed_and_rotated(x, partner, k_norm, angles, cos, sin, d, other, DIM, ROTARY, EPS)
            tl.store(index_keys + slot * DIM + d, x.to(index_keys.dtype.element_ty), live)


@kernel
def complete_blocks_kernel(
    table, req_slots, k_norm, cos, sin, positions, firsts, slots, count, index_keys,
    TABLE_STRIDE: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TIME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows < count[0] whose token is the last of a block of BLOCK store the block's index key in their slot: the mean
    of the keys in the slots of the block's tokens, normalised, and rotated by the block's first position. firsts: the
    three positions of each row's block's first token, see `row_angles`; None: the block's first number. Grid (n)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    position, slot = tl.load(positions + i), tl.load(slots + i).to(tl.int64)
    if ((position + 1) % BLOCK != 0) | (slot < 0):
        return
    d, first = tl.arange(0, SIZE), position + 1 - BLOCK
    live = d < DIM
    _, other = own_and_partner(d, ROTARY, False)
    held = table + tl.load(req_slots + i).to(tl.int64) * TABLE_STRIDE + first
    x, partner = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    for at in range(BLOCK):
        key = index_keys + tl.load(held + at).to(tl.int64) * DIM
        x += tl.load(key + d, live, 0.0).to(tl.float32)
        partner += tl.load(key + other, live, 0.0).to(tl.float32)
    x, partner = x / BLOCK, partner / BLOCK
    angles = row_angles(first, firsts, i, HEIGHT, WIDTH, TIME, ROTARY, SIZE)
    x = normed_and_rotated(x, partner, k_norm, angles, cos, sin, d, other, DIM, ROTARY, EPS)
    tl.debug_barrier()  # all threads have read the token's own key
    tl.store(index_keys + slot * DIM + d, x.to(index_keys.dtype.element_ty), live)


@triton.jit
def best_of_block(query, index_keys, held, block, BLOCK: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
                  KEYS: tl.constexpr):  # fmt: skip
    """Returns the highest products [M] of queries [M, SIZE] with the keys of a block; KEYS are processed at once."""
    d = tl.arange(0, SIZE)
    best = tl.full([query.shape[0]], float("-inf"), tl.float32)
    for first in tl.static_range(0, BLOCK, KEYS):
        at = first + tl.arange(0, KEYS)
        there = at < BLOCK
        slot = tl.load(held + block * BLOCK + at, there, 0).to(tl.int64)
        k = tl.load(index_keys + slot[:, None] * DIM + d[None, :], there[:, None] & (d < DIM)[None, :], 0.0)
        products = tl.where(there[None, :], tl.dot(query, tl.trans(k)), float("-inf"))
        best = tl.maximum(best, tl.max(products, 1))
    return best


@kernel
def block_maxima_kernel(
    q, index_keys, table, req_slots, positions, count, first_row, scores,
    TABLE_STRIDE: tl.constexpr, SCORES_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TOP: tl.constexpr,
    BLOCK: tl.constexpr, LOCAL: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores the blocks before the tail of each row first_row[0] + i < count[0], for each of HEADS choices, of rows
    with more than TOP of them. Grid (groups of ROWS rows, programs that share their blocks).

    q [n, HEADS, DIM] and index_keys [slots, DIM] of one dtype; scores float32 [.., HEADS, SCORES_STRIDE]: row i. H, M:
    powers of two that hold HEADS, and ROWS * H. Other arguments as for `index_scores_kernel`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    base, existing = tl.load(first_row), tl.load(count)
    first = base + tl.program_id(0) * ROWS
    if first >= existing:
        return
    m, d = tl.arange(0, M), tl.arange(0, SIZE)
    end, head = tl.minimum(first + ROWS, existing), m % H
    row = first + m // H
    live = (row < end) & (head < HEADS)
    scored = tl.load(positions + row, live, -1) // BLOCK + 1 - LOCAL
    most = tl.max(scored, 0)
    if most <= TOP:
        return
    at = (row.to(tl.int64) * HEADS + head) * DIM
    query = tl.load(q + at[:, None] + d[None, :], live[:, None] & (d < DIM)[None, :], 0.0)
    to = scores + ((row - base).to(tl.int64) * HEADS + head) * SCORES_STRIDE
    one, is_shared = request_of_rows(req_slots, first, row, live)
    for block in range(tl.program_id(1), most, tl.num_programs(1)):
        if is_shared:  # as in a prompt: the keys serve all rows
            held = table + one.to(tl.int64) * TABLE_STRIDE
            best = best_of_block(query, index_keys, held, block, BLOCK, DIM, SIZE, KEYS)
            tl.store(to + block, best, live & (block < scored))
        else:
            for i in range(end - first):
                if block < tl.load(positions + first + i) // BLOCK + 1 - LOCAL:
                    held = table + tl.load(req_slots + first + i).to(tl.int64) * TABLE_STRIDE
                    best = best_of_block(query, index_keys, held, block, BLOCK, DIM, SIZE, KEYS)
                    tl.store(to + block, best, live & (row == first + i))
