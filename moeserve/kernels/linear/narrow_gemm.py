"""Multiplies more than a few tokens by a float matrix with few rows, such as a router's, on the ordinary cores.

Tiles are small, because otherwise a GPU would have too few programs. Each thread has its own columns and the sums
of all pairs of the tile's tokens and rows, so that a loaded number is used as often as the tile is wide.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def multiply_pairs(
    x, w, live_tokens, live_rows, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Returns float32 [BM, BN]: the products of the rows that x [BM] and w [BN] point to."""
    acc = tl.zeros([BM, BN, BK], tl.float32)
    for first in range(0, COLS, BK):
        k = (first + tl.arange(0, BK))[None, None, :]
        a = tl.load(x[:, None, None] + k, live_tokens[:, None, None] & (k < COLS), 0.0)
        b = tl.load(w[None, :, None] + k, live_rows[None, :, None] & (k < COLS), 0.0)
        acc += a.to(tl.float32) * b.to(tl.float32)
    return tl.sum(acc, 2)


@kernel
def narrow_gemm_kernel(
    x, w, second, bias, count, out,
    ROWS: tl.constexpr, SECOND_ROWS: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out[i] = W x[i] for rows i < count[0], [.., ROWS + SECOND_ROWS]; an optional second matrix gives the
    last columns; plus bias float32 [ROWS + SECOND_ROWS] if given. Grid (row tiles of W, then of the second matrix;
    blocks of BM tokens)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, block = tl.program_id(0), tl.program_id(1)
    existing = tl.load(count)
    if block * BM >= existing:
        return
    TILES: tl.constexpr = (ROWS + BN - 1) // BN
    i = block * BM + tl.arange(0, BM)
    live = i < existing
    rows = x + i.to(tl.int64) * COLS
    n = tile * BN + tl.arange(0, BN)
    column, there = n, n < ROWS
    y = tl.zeros([BM, BN], tl.float32)
    if tile < TILES:
        y = multiply_pairs(rows, w + n * COLS, live, there, COLS, BM, BN, BK)
    elif SECOND_ROWS > 0:
        n -= TILES * BN
        column, there = ROWS + n, n < SECOND_ROWS
        y = multiply_pairs(rows, second + n * COLS, live, there, COLS, BM, BN, BK)
    if bias is not None:
        y += tl.load(bias + column, there, 0.0)[None, :]
    at = out + i.to(tl.int64)[:, None] * (ROWS + SECOND_ROWS) + column[None, :]
    tl.store(at, y.to(out.dtype.element_ty), live[:, None] & there[None, :])
