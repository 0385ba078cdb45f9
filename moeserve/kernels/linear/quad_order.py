"""Quad order: the order of activation columns for quad_gemm.py.

A warpgroup's product of 16 columns takes its left operand from registers: lane t of a quad of lanes holds columns 2
t, 2 t + 1, 2 t + 8 and 2 t + 9 of a row. Which columns of the matrix these are is free, if the right operand uses
the same ones. Here they are four neighbours, so that a lane's codes are whole words of a row, KB of them in a row.

Among KB K blocks, the 16 * KB columns of the first field come first, then the next field's. Place p of a field
belongs to word p // 16 of lane p % 8 // 2, byte p % 16 // 8 * 2 + p % 2.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def quad_columns(place, KB: tl.constexpr):
    """Returns the column (int32) of a row that the products read at each of the given places. KB: K blocks of 128
    columns that are read together."""
    FIELD: tl.constexpr = 16 * KB
    p, field = place % FIELD, place // FIELD % 8
    byte = p % 8 // 2 * (4 * KB) + p // 16 * 4 + p % 16 // 8 * 2 + p % 2
    return place // (8 * FIELD) * (8 * FIELD) + byte // 16 * 128 + field * 16 + byte % 16


@kernel
def quad_order_kernel(
    x, count, out, COLS: tl.constexpr, TOP_K: tl.constexpr, KB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Computes out[i] = x[i] in quad order, [n, COLS] each, for i < count[0] * TOP_K. Grid (n, blocks of BLOCK
    columns)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (place < COLS) & (i < tl.load(count) * TOP_K)
    row = i.to(tl.int64) * COLS
    tl.store(out + row + place, tl.load(x + row + quad_columns(place, KB), there, 0.0), there)
