"""The adapters' products for a small batch, each row on its own.

These kernels spend most of their time finding and reading their matrices. So they do that before the previous
kernel has ended, which writes neither: the count and the slots are copied to the device before a step, the table
and the matrices between steps. Only x, shrunk and the outputs are read after it. Every program waits, so that the
next kernel can rely on the previous one having ended.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.lora.triton import matrix_and_rank, table_entry


@triton.jit
def row_matrix(
    table, slots, count, row, part, COLUMN: tl.constexpr, PARTS: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """Returns a pointer to the matrix of a row's product, A (COLUMN 0) or B (1), and its rank as int32; rank 0 if the
    row has no adapter or does not exist."""
    slot = tl.where(row < tl.load(count), tl.load(slots + row), -1)
    entry = table_entry(table, tl.maximum(slot, 0), part, 0, PARTS, 1, SLOT_STRIDE)
    matrix, rank = matrix_and_rank(entry, COLUMN, FLOAT)
    return matrix, tl.multiple_of(tl.where(slot >= 0, rank, 0), 16)


@kernel
def shrink_small_batch_kernel(
    x, slots, table, count, shrunk, COLS: tl.constexpr, X_STRIDE: tl.constexpr, PARTS: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, RANK: tl.constexpr, FLOAT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes shrunk[row, part] = A x[row], float32 [n, PARTS, RANK], up to the adapter's rank, for rows x [n, COLS]
    of floats; see triton.shrink_kernel. Grid (programs that take the ranks' tiles of BR in turn, PARTS, n)."""
    if PDL:
        gdc_launch_dependents()
    tile, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    a, rank = row_matrix(table, slots, count, row, part, 0, PARTS, SLOT_STRIDE, FLOAT)
    step = tl.num_programs(0) * BR
    r, k = tile * BR + tl.arange(0, BR), tl.arange(0, BK)
    w = tl.load(a + r[:, None] * COLS + k[None, :], (r < rank)[:, None] & (k < COLS)[None, :], 0.0)
    if PDL:
        gdc_wait()
    x += row.to(tl.int64) * X_STRIDE
    at = shrunk + (row * PARTS + part).to(tl.int64) * RANK
    for _ in range(tile * BR, rank, step):
        acc = w.to(tl.float32) * tl.load(x + k, k < COLS, 0.0).to(tl.float32)[None, :]
        for first in tl.static_range(BK, COLS, BK):
            more = first + k
            value = tl.load(x + more, more < COLS, 0.0).to(tl.float32)
            w = tl.load(
                a + r[:, None] * COLS + more[None, :], (r < rank)[:, None] & (more < COLS)[None, :], 0.0
            )
            acc += w.to(tl.float32) * value[None, :]
        tl.store(at + r, tl.sum(acc, 1), r < rank)
        r += step
        w = tl.load(a + r[:, None] * COLS + k[None, :], (r < rank)[:, None] & (k < COLS)[None, :], 0.0)


@triton.jit
def add_row(w, b, rank, inner, out, c, there, BR: tl.constexpr):
    """Computes out[c] += b[c] times `inner`. w [BN, BR]: the first columns of b[c]."""
    r = tl.arange(0, BR)
    y = tl.load(out + c, there, 0.0).to(tl.float32)
    for first in range(0, rank, BR):
        y += tl.sum(w.to(tl.float32) * tl.load(inner + first + r)[None, :], 1)
        more = first + BR + r
        w = tl.load(b + c[:, None] * rank + more[None, :], there[:, None] & (more < rank)[None, :], 0.0)
    tl.store(out + c, y.to(out.dtype.element_ty), there)


@kernel
def expand_small_batch_kernel(
    shrunk, slots, table, count, out, second, third, ROWS: tl.constexpr, SECOND_ROWS: tl.constexpr,
    THIRD_ROWS: tl.constexpr, STRIDE: tl.constexpr, SECOND_STRIDE: tl.constexpr, THIRD_STRIDE: tl.constexpr,
    PARTS: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANK: tl.constexpr, FLOAT: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds B shrunk[row, part] to row `row` of the part's output; see triton.expand_kernel with ADDS. Grid (the
    outputs' tiles of BN columns, n)."""
    if PDL:
        gdc_launch_dependents()
    TILES: tl.constexpr = (ROWS + BN - 1) // BN
    BOTH: tl.constexpr = TILES + (SECOND_ROWS + BN - 1) // BN
    tile, row = tl.program_id(0), tl.program_id(1)
    part, width = tl.full([], 0, tl.int32), tl.full([], ROWS, tl.int32)
    if tile >= BOTH:
        part, width, tile = part + 2, tl.full([], THIRD_ROWS, tl.int32), tile - BOTH
    elif tile >= TILES:
        part, width, tile = part + 1, tl.full([], SECOND_ROWS, tl.int32), tile - TILES
    b, rank = row_matrix(table, slots, count, row, part, 1, PARTS, SLOT_STRIDE, FLOAT)
    c, r = tile * BN + tl.arange(0, BN), tl.arange(0, BR)
    there = (c < width) & (rank > 0)
    w = tl.load(b + c[:, None] * rank + r[None, :], there[:, None], 0.0)
    if PDL:
        gdc_wait()
    if rank == 0:
        return
    inner, row = shrunk + (row * PARTS + part).to(tl.int64) * RANK, row.to(tl.int64)
    if part == 0:
        add_row(w, b, rank, inner, out + row * STRIDE, c, there, BR)
    elif PARTS > 1:
        if part == 1:
            add_row(w, b, rank, inner, second + row * SECOND_STRIDE, c, there, BR)
        elif PARTS > 2:
            add_row(w, b, rank, inner, third + row * THIRD_STRIDE, c, there, BR)
