"""Multiplies few tokens by a matrix, which is memory-bound. A program computes some rows of the matrix over all its
columns.

It loads the weights of up to 4,096 columns, 16 bytes per thread, before it waits for the kernel that computes the
activations, so that both overlap. The codes stay in registers for T tokens, one after another. A matrix with more
columns is read once for all T tokens, one block of columns after another; from 3 tokens on only where the tensor cores
do not multiply it (wide_matrices.py).
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
# (Triton compiles no starred tuples.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.linear.k_blocks import dot_k_blocks, k_block_indices, load_k_blocks, tile_rows


@triton.jit
def multiply_wide(
    x_codes, x_scales, codes, scales, supers, bias, out, first_row, first, end,
    ROWS: tl.constexpr, COLS: tl.constexpr, STRIDE: tl.constexpr, F: tl.constexpr, T: tl.constexpr, BR: tl.constexpr,
    NB: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the same as `multiply_quantised`, for up to T tokens and more than BK columns, BK at a time. Tokens from
    `end` on repeat the last one, and are not stored."""
    KB: tl.constexpr = BK // 128
    K_BLOCKS: tl.constexpr = (COLS + 127) // 128
    u = k_block_indices(KB, BR)
    r = tile_rows(first_row, ROWS, BR, NB)
    k_blocks = load_k_blocks(codes, scales, supers, r, u, (u < K_BLOCKS) & (r >= 0), COLS, F)
    if PDL:
        gdc_wait()
    if first < end:
        sums = ()
        for _ in tl.static_range(T):
            sums = sums + (tl.zeros((u + r).shape, tl.float32),)
        for at in tl.static_range(0, K_BLOCKS, KB):
            v = at + u
            if at > 0:
                k_blocks = load_k_blocks(codes, scales, supers, r, v, (v < K_BLOCKS) & (r >= 0), COLS, F)
            more = ()
            for t in tl.static_range(T):
                i = tl.minimum(first + t, end - 1)
                from_codes, from_scales = x_codes + i * (COLS // 4), x_scales + i * (COLS // 32)
                more = more + (dot_k_blocks(sums[t], k_blocks, v, from_codes, from_scales, COLS, F),)
            sums = more
        row = first_row + tl.arange(0, BR * NB)
        for t in tl.static_range(T):
            y = tl.reshape(tl.sum(sums[t], 0), [BR * NB])
            if bias is not None:
                y += tl.load(bias + row, row < ROWS, 0.0)
            to = out + (first + t) * STRIDE + row
            tl.store(to, y.to(out.dtype.element_ty), (row < ROWS) & (first + t < end))


@triton.jit
def multiply_quantised(
    x_codes, x_scales, codes, scales, supers, bias, out, first_row, first, end,
    ROWS: tl.constexpr, COLS: tl.constexpr, STRIDE: tl.constexpr, F: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    KB: tl.constexpr = BK // 128
    K_BLOCKS: tl.constexpr = (COLS + 127) // 128
    if bias is not None:
        biased = first_row + tl.arange(0, BR * NB)
        added = tl.load(bias + biased, biased < ROWS, 0.0)
    u = k_block_indices(KB, BR)
    r = tile_rows(first_row, ROWS, BR, NB)
    k_blocks = load_k_blocks(codes, scales, supers, r, u, (u < K_BLOCKS) & (r >= 0), COLS, F)
    if PDL:
        gdc_wait()
    for i in range(first, end):
        from_codes, from_scales = x_codes + i * (COLS // 4), x_scales + i * (COLS // 32)
        acc = dot_k_blocks(tl.zeros((u + r).shape, tl.float32), k_blocks, u, from_codes, from_scales, COLS, F)
        for at in tl.static_range(KB, K_BLOCKS, KB):
            v = at + u
            more = load_k_blocks(codes, scales, supers, r, v, (v < K_BLOCKS) & (r >= 0), COLS, F)
            acc = dot_k_blocks(acc, more, v, from_codes, from_scales, COLS, F)
        row = first_row + tl.arange(0, BR * NB)
        y = tl.reshape(tl.sum(acc, 0), [BR * NB])
        if bias is not None:
            y += added
        tl.store(out + i * STRIDE + row, y.to(out.dtype.element_ty), row < ROWS)


@triton.jit
def multiply_floats(
    x, codes, bias, out, first_row, first, end,
    ROWS: tl.constexpr, COLS: tl.constexpr, STRIDE: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = first_row + tl.arange(0, BR)
    k = tl.arange(0, BK)
    r = tl.minimum(row, ROWS - 1)[:, None] * COLS
    w = tl.load(codes + r + k[None, :], (k < COLS)[None, :], 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    for i in range(first, end):
        sums = w * tl.load(x + i * COLS + k, k < COLS, 0.0).to(tl.float32)[None, :]
        for at in tl.static_range(BK, COLS, BK):
            more = tl.load(codes + r + (at + k)[None, :], (at + k < COLS)[None, :], 0.0).to(tl.float32)
            sums += more * tl.load(x + i * COLS + at + k, at + k < COLS, 0.0).to(tl.float32)[None, :]
        y = tl.sum(sums, 1)
        if bias is not None:
            y += tl.load(bias + row, row < ROWS, 0.0)
        tl.store(out + i * STRIDE + row, y.to(out.dtype.element_ty), row < ROWS)


@triton.jit
def multiply_rows(
    x, x_codes, x_scales, codes, scales, supers, bias, out, first_row, first, end,
    ROWS: tl.constexpr, COLS: tl.constexpr, STRIDE: tl.constexpr, F: tl.constexpr, T: tl.constexpr, BR: tl.constexpr,
    NB: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies rows first_row .. first_row + BR * NB - 1 of the matrix [ROWS, COLS] by tokens `first` .. end - 1 (at
    most T) of the activations, and stores the products in `out`, rows STRIDE apart. F: the weights' block format; None:
    floats, which read `x`, while the others read `x_codes` and `x_scales`."""
    if F is None:
        multiply_floats(x, codes, bias, out, first_row, first, end, ROWS, COLS, STRIDE, BR * NB, BK, PDL)
    elif T > 1 and COLS > BK:
        multiply_wide(
            x_codes, x_scales, codes, scales, supers, bias, out, first_row, first, end, ROWS, COLS, STRIDE, F, T, BR,
            NB, BK, PDL,
        )  # fmt: skip
    else:
        multiply_quantised(
            x_codes, x_scales, codes, scales, supers, bias, out, first_row, first, end, ROWS, COLS, STRIDE, F, BR, NB,
            BK, PDL,
        )  # fmt: skip


@kernel
def gemv_kernel(
    x, x_codes, x_scales, codes, scales, supers, bias, count, out, second_codes, second_scales, second_supers,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, SECOND_ROWS: tl.constexpr, F_SECOND: tl.constexpr,
    T: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out[i] = W x[i], [.., ROWS + SECOND_ROWS], for rows below count[0]; an optional second matrix gives the
    last columns; plus bias float32 [ROWS + SECOND_ROWS] if given. The matrices and the count are read before the
    previous kernel has ended: it must not write them.

    Grid (row tiles of W, then of the second matrix; blocks of T rows of x). BK: columns per iteration. Offsets are
    int32, because there are few tokens."""
    if PDL:
        gdc_launch_dependents()
    tile, first = tl.program_id(0), tl.program_id(1) * T
    end = tl.minimum(first + T, tl.load(count))
    TILES: tl.constexpr = (ROWS + BR * NB - 1) // (BR * NB)
    STRIDE: tl.constexpr = ROWS + SECOND_ROWS
    if tile < TILES:
        multiply_rows(
            x, x_codes, x_scales, codes, scales, supers, bias, out, tile * (BR * NB), first, end, ROWS, COLS, STRIDE, F,
            T, BR, NB, BK, PDL,
        )  # fmt: skip
    elif SECOND_ROWS > 0:
        second_bias = bias
        if bias is not None:
            second_bias = bias + ROWS
        multiply_rows(
            x, x_codes, x_scales, second_codes, second_scales, second_supers, second_bias, out + ROWS,
            (tile - TILES) * (BR * NB), first, end, SECOND_ROWS, COLS, STRIDE, F_SECOND, T, BR, NB,
            BK, PDL,
        )  # fmt: skip
