"""The activations of sliced_k_gemm.py: the rows of a block of tokens, split into the eight fields of K blocks."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import COMPILED
from moeserve.kernels.linear.gemm import route_pointers


@triton.constexpr_function
def mma_dtype(dtype):
    """Returns the dtype that activations of `dtype` are multiplied in: float32 is rounded to bfloat16."""
    return tl.bfloat16 if COMPILED and dtype == tl.float32 else dtype


@triton.jit
def rounded(a):
    """Returns float32 activations rounded to bfloat16. The interpreter multiplies no bfloat16, so there the result has
    the same values in float32."""
    if COMPILED:
        out = a.to(tl.bfloat16)
    else:
        bits = a.to(tl.int32, bitcast=True)
        out = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return out


@triton.jit
def for_row_blocks(a, RB: tl.constexpr):
    """Repeats [KB, 16, BM] to [KB * RB, 16, BM]."""
    wide = tl.broadcast_to(a[:, None, :, :], [a.shape[0], RB, 16, a.shape[2]])
    return tl.reshape(wide, [a.shape[0] * RB, 16, a.shape[2]])


@triton.jit
def activation_pointers(
    x, block_routes, count, block, COLS: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, KB: tl.constexpr
):
    """Returns pointers [KB * 8 * BM, 16] to the first KB K blocks of the block's rows of x, a mask of existing rows
    [.., 1], and the columns [.., 16]: 16 columns of all tokens, then the next 16, which is also their order in
    shared memory. Longer pieces would cause more bank conflicts, shorter ones would fetch a sector twice."""
    at = tl.arange(0, KB * 8 * BM)
    _routes, live, rows = route_pointers(x, block_routes, count, block * BM + at % BM, COLS, TOP_K)
    k = (at // BM * 16)[:, None] + tl.arange(0, 16)[None, :]
    return rows[:, None] + k, live[:, None], k


@triton.jit
def load_activations(
    x, live, k, first, COLS: tl.constexpr, BM: tl.constexpr, KB: tl.constexpr, RB: tl.constexpr
):
    """Returns the eight fields [KB * RB, 16, BM] of K blocks `first` on; x, live, k: from activation_pointers."""
    if COLS % (KB * 128) != 0:
        live = live & (first * 128 + k < COLS)
    a = tl.load(x + first * 128, live, 0.0)
    if a.dtype == tl.float32:
        a = rounded(a)
    a = tl.reshape(a, [KB, 2, 2, 2, BM, 16])  # K blocks, fields, tokens, columns
    a = tl.permute(a, [0, 5, 4, 1, 2, 3])
    even, odd = tl.split(a)
    a04, a26 = tl.split(even)
    a15, a37 = tl.split(odd)
    a0, a4 = tl.split(a04)
    a2, a6 = tl.split(a26)
    a1, a5 = tl.split(a15)
    a3, a7 = tl.split(a37)
    return (
        for_row_blocks(a0, RB), for_row_blocks(a1, RB), for_row_blocks(a2, RB), for_row_blocks(a3, RB),
        for_row_blocks(a4, RB), for_row_blocks(a5, RB), for_row_blocks(a6, RB), for_row_blocks(a7, RB),
    )  # fmt: skip
