"""Few tokens times a matrix: memory-bound. A program owns some rows of the output and all columns.

It reads each weight once from memory, 16 bytes a thread, before it waits for the kernel that makes the activations: the
weights are on their way meanwhile. They stay in registers, as codes, for T tokens one after another.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.linear.units import dot_units, load_units, tile_rows, unit_indices


@triton.jit
def multiply_quantised(
    x_codes, x_scales, codes, scales, supers, out, first_row, first, end,
    ROWS: tl.constexpr, COLS: tl.constexpr, STRIDE: tl.constexpr, F: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    UB: tl.constexpr = BK // 128
    UNITS: tl.constexpr = (COLS + 127) // 128
    u = unit_indices(UB, BR)
    r = tile_rows(first_row, ROWS, BR, NB)
    units = load_units(codes, scales, supers, r, u, (u < UNITS) & (r >= 0), COLS, F)
    if PDL:
        gdc_wait()
    for i in range(first, end):
        from_codes, from_scales = x_codes + i * (COLS // 4), x_scales + i * (COLS // 32)
        acc = dot_units(tl.zeros((u + r).shape, tl.float32), units, u, from_codes, from_scales, COLS, F)
        for at in tl.static_range(UB, UNITS, UB):
            v = at + u
            more = load_units(codes, scales, supers, r, v, (v < UNITS) & (r >= 0), COLS, F)
            acc = dot_units(acc, more, v, from_codes, from_scales, COLS, F)
        row = first_row + tl.arange(0, BR * NB)
        y = tl.reshape(tl.sum(acc, 0), [BR * NB])
        tl.store(out + i * STRIDE + row, y.to(out.dtype.element_ty), row < ROWS)


@triton.jit
def multiply_floats(
    x, codes, out, first_row, first, end,
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
        y = tl.sum(sums, 1).to(out.dtype.element_ty)
        tl.store(out + i * STRIDE + row, y, row < ROWS)


@triton.jit
def multiply_rows(
    x, x_codes, x_scales, codes, scales, supers, out, first_row, first, end,
    ROWS: tl.constexpr, COLS: tl.constexpr, STRIDE: tl.constexpr, F: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows first_row .. + BR * NB - 1 of the matrix times rows `first` .. below `end` of the activations."""
    if F is None:
        multiply_floats(x, codes, out, first_row, first, end, ROWS, COLS, STRIDE, BR * NB, BK, PDL)
    else:
        multiply_quantised(
            x_codes, x_scales, codes, scales, supers, out, first_row, first, end, ROWS, COLS, STRIDE, F, BR, NB, BK, PDL
        )  # fmt: skip


@kernel
def gemv_kernel(
    x, x_codes, x_scales, codes, scales, supers, count, out, beside_codes, beside_scales, beside_supers,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, BESIDE_ROWS: tl.constexpr, F_BESIDE: tl.constexpr,
    T: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[i] = W x[i], [.., ROWS + BESIDE_ROWS], the last columns by the matrix beside where there is one, for rows
    below count[0]. The matrices and the count are read before the kernel ahead has ended: it writes neither.

    Grid (row tiles of W, then those of the matrix beside; blocks of T rows of x). BK: columns at once. Offsets are
    int32: the tokens are few.
    """
    if PDL:
        gdc_launch_dependents()
    tile, first = tl.program_id(0), tl.program_id(1) * T
    end = tl.minimum(first + T, tl.load(count))
    TILES: tl.constexpr = (ROWS + BR * NB - 1) // (BR * NB)
    STRIDE: tl.constexpr = ROWS + BESIDE_ROWS
    if tile < TILES:
        multiply_rows(
            x, x_codes, x_scales, codes, scales, supers, out, tile * (BR * NB), first, end, ROWS, COLS, STRIDE, F, BR,
            NB, BK, PDL,
        )  # fmt: skip
    elif BESIDE_ROWS > 0:
        multiply_rows(
            x, x_codes, x_scales, beside_codes, beside_scales, beside_supers, out + ROWS, (tile - TILES) * (BR * NB),
            first, end, BESIDE_ROWS, COLS, STRIDE, F_BESIDE, BR, NB, BK, PDL,
        )  # fmt: skip
