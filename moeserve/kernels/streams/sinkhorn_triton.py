"""Streams that are mixed by doubly stochastic matrices, in Triton: `sinkhorn.py` has the arithmetic.

A row has STREAMS vectors of HIDDEN numbers, one after another; its norm is over all of them. With many rows a row is
one program's. With few, programs divide its columns: the norm has no gain, so products with the normalised row are
those with the row itself, times the inverse root mean square. `mixed_products_kernel` computes sums over the columns of
each program, and `read_mixed_kernel` adds them.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
# (Triton compiles no starred tuples.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.norm.parts import add_parts
from moeserve.kernels.norm.triton import store_norm
from moeserve.kernels.quantize.triton import store_quantized


@triton.jit
def block_output(
    parts,
    part_weights,
    part_ids,
    extra,
    row,
    c,
    live,
    HIDDEN: tl.constexpr,
    P: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Returns extra[row] + sum_j part_weights[row, j] * parts[row, j] at columns c [SIZE], without the parts whose
    part_ids are negative."""
    block = tl.zeros([SIZE], tl.float32)
    if extra is not None:
        block += tl.load(extra + row * HIDDEN + c, live, 0.0)
    return add_parts(block, parts, part_weights, part_ids, row, c, live, HIDDEN, P, P)


@triton.jit
def mix_columns(
    x, parts, part_weights, part_ids, extra, weights, row, c, live,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Returns, for each stream s, sum_j mix[j, s] x[row, j] + added[s] * the block's output (`block_output`) at columns
    c [SIZE]; without weights x[row, s]. weights: `mixed_norm_kernel`'s."""
    at = x + row * (STREAMS * HIDDEN) + c
    values = ()
    for s in tl.static_range(STREAMS):
        values = values + (tl.load(at + s * HIDDEN, live, 0.0),)
    mixed = values
    if weights is not None:
        of_row = weights + row * (STREAMS * (1 + STREAMS))
        block = block_output(parts, part_weights, part_ids, extra, row, c, live, HIDDEN, P, SIZE)
        mixed = ()
        for s in tl.static_range(STREAMS):
            total = tl.load(of_row + s) * block
            for j in tl.static_range(STREAMS):
                total += tl.load(of_row + STREAMS + j * STREAMS + s) * values[j]
            mixed = mixed + (total,)
    return mixed


@kernel
def mixed_norm_kernel(
    x, parts, part_weights, part_ids, extra, weights, rows, count, y, codes, scales,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, P: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes x[i, s] = sum_j mix[i, j, s] x[i, j] + added[i, s] * block[i] (`block_output`); then y = x[i] over the
    root mean square of all its streams. Grid (m), for rows i < count[0].

    x float32 [n, STREAMS * HIDDEN]; parts to extra: see `block_output`; weights float32 [n, STREAMS * (1 + STREAMS)]:
    added, then mix; None: x is not changed. rows int32 [m]: output row i is computed from row rows[i], and x stays
    unchanged. y and codes with scales [m, STREAMS * HIDDEN], each optional; without both only x is written. BLOCK: a
    multiple of 32, columns at once.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    row = i.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + i).to(tl.int64)
    width: tl.constexpr = STREAMS * HIDDEN
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, HIDDEN, BLOCK):
        c = first + tl.arange(0, BLOCK)
        live = c < HIDDEN
        mixed = mix_columns(
            x, parts, part_weights, part_ids, extra, weights, row, c, live, STREAMS, HIDDEN, P, BLOCK
        )
        for s in tl.static_range(STREAMS):
            squares += mixed[s] * mixed[s]
            if weights is not None and rows is None:
                tl.store(x + row * width + s * HIDDEN + c, mixed[s], live)
    if y is not None or codes is not None:
        scale = tl.rsqrt(tl.sum(squares, 0) / width + EPS)
        tl.debug_barrier()  # a thread reads below what others have stored
        out = i.to(tl.int64)
        for s in tl.static_range(STREAMS):
            for first in range(0, HIDDEN, BLOCK):
                c = first + tl.arange(0, BLOCK)
                live = c < HIDDEN
                normed = tl.load(x + row * width + s * HIDDEN + c, live, 0.0) * scale
                column = s * HIDDEN + first
                if y is not None:
                    tl.store(y + out * width + s * HIDDEN + c, normed.to(y.dtype.element_ty), live)
                if codes is not None:
                    at_codes, at_scales = codes + out * width, scales + out * (width // 32)
                    store_quantized(normed, at_codes, at_scales, column, (s + 1) * HIDDEN, BLOCK)


@kernel
def mixed_products_kernel(
    x, parts, part_weights, part_ids, extra, weights, rows, count, matrix, sums,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, P: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Mixes the streams and adds the block's output as `mixed_norm_kernel` does, and multiplies them by the matrix,
    BLOCK columns of each stream a program. Grid (m, blocks of HIDDEN), for rows i < count[0]. The matrix and the count
    are read before the previous kernel has ended: it must not write them.

    matrix [VALUES, STREAMS * HIDDEN], floats; sums float32 [m, blocks, 1 + VALUES]: of the squares of x[i] at the
    program's columns, and of its products with the matrix's rows. PADDED: VALUES or the power of two above; the other
    arguments are `mixed_norm_kernel`'s.
    """
    if PDL:
        gdc_launch_dependents()
    i = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < HIDDEN
    value = tl.arange(0, PADDED)
    width: tl.constexpr = STREAMS * HIDDEN
    existing = tl.load(count)
    factors = ()
    for s in tl.static_range(STREAMS):
        at = matrix + value[:, None] * width + s * HIDDEN + c[None, :]
        factors = factors + (tl.load(at, (value < VALUES)[:, None] & live[None, :], 0.0),)
    if PDL:
        gdc_wait()
    if i >= existing:
        return
    row = i.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + i).to(tl.int64)
    mixed = mix_columns(
        x, parts, part_weights, part_ids, extra, weights, row, c, live, STREAMS, HIDDEN, P, BLOCK
    )
    squares = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([PADDED, BLOCK], tl.float32)
    for s in tl.static_range(STREAMS):
        if weights is not None and rows is None:
            tl.store(x + row * width + s * HIDDEN + c, mixed[s], live)
        squares += mixed[s] * mixed[s]
        products += factors[s].to(tl.float32) * mixed[s][None, :]
    to = sums + (i.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (1 + VALUES)
    tl.store(to, tl.sum(squares, 0))
    tl.store(to + 1 + value, tl.sum(products, 1), value < VALUES)


@triton.jit
def load_products(
    products, column, live, scale, VALUES: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr
):
    """Returns a row's products [SIZE] at columns `column`, zeros where not live. products: the row's own; with BLOCKS >
    0 `mixed_products_kernel`'s sums of the row, which are added and multiplied by scale. PADDED: BLOCKS or the power of
    two above."""
    if BLOCKS == 0:
        out = tl.load(products + column, live, 0.0)
    else:
        block = tl.arange(0, PADDED)[:, None]
        at = products + block * (1 + VALUES) + 1 + column[None, :]
        out = tl.sum(tl.load(at, (block < BLOCKS) & live[None, :], 0.0), 0) * scale
    return out


@kernel
def read_mixed_kernel(
    products, x, rows, base, scale, norm, count, y, codes, scales, exact, weights,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, MIX_EPS: tl.constexpr, ITERATIONS: tl.constexpr, EPS: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr, PADDED_BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y[i] = RMSNorm(a weighted sum of x[rows[i]]'s streams) * norm; weights[i] = the weights of the block's
    output and the mix. Grid (m), for rows i < count[0].

    products float32 [m, STREAMS * (2 + STREAMS)], before the head (weights None) [m, STREAMS], or None: the mean of the
    streams is read; BLOCKS > 0: `mixed_products_kernel`'s sums of so many programs a row; x float32 [n, STREAMS *
    HIDDEN]; rows int32 [m], None: row i; base, scale: SinkhornMix's; norm float32 [HIDDEN]; y, codes with scales, exact
    float32: [m, HIDDEN], each optional; weights float32 [m, STREAMS * (1 + STREAMS)]. SIZE, PADDED and PADDED_BLOCKS:
    HIDDEN, STREAMS and BLOCKS or the powers of two above."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    out = i.to(tl.int64)
    row = out
    if rows is not None:
        row = tl.load(rows + i).to(tl.int64)
    VALUES: tl.constexpr = STREAMS * (2 + STREAMS) if weights is not None else STREAMS
    c = tl.arange(0, SIZE)
    live = c < HIDDEN
    values = ()
    for s in tl.static_range(STREAMS):
        values = values + (tl.load(x + (row * STREAMS + s) * HIDDEN + c, live, 0.0),)
    stream = tl.arange(0, PADDED)
    there = stream < STREAMS
    inverse = 1.0
    if BLOCKS > 0:
        of_row = products + out * (BLOCKS * (1 + VALUES))
        part = tl.arange(0, PADDED_BLOCKS)
        squares = tl.sum(tl.load(of_row + part * (1 + VALUES), part < BLOCKS, 0.0), 0)
        inverse = tl.rsqrt(squares / (STREAMS * HIDDEN) + EPS)
    elif products is not None:
        of_row = products + out * VALUES
    if products is not None:
        before = load_products(of_row, stream, there, inverse, VALUES, BLOCKS, PADDED_BLOCKS) * tl.load(scale)
        before = tl.sigmoid(before + tl.load(base + stream, there, 0.0)) + MIX_EPS
    total = tl.zeros([SIZE], tl.float32)
    for s in tl.static_range(STREAMS):
        if products is None:
            total += values[s] / STREAMS
        else:
            total += tl.sum(tl.where(stream == s, before, 0.0), 0) * values[s]
    store_norm(total, tl.load(norm + c, live, 0.0), y, codes, scales, exact, out, HIDDEN, EPS, SIZE)
    if weights is not None:
        found = weights + out * STREAMS * (1 + STREAMS)
        logit = load_products(of_row, STREAMS + stream, there, inverse, VALUES, BLOCKS, PADDED_BLOCKS)
        added = 2.0 * tl.sigmoid(logit * tl.load(scale + 1) + tl.load(base + STREAMS + stream, there, 0.0))
        tl.store(found + stream, added, there)
        flat = tl.arange(0, PADDED * PADDED)
        cell = flat // PADDED * STREAMS + flat % PADDED  # from, to
        existing = (flat // PADDED < STREAMS) & (flat % PADDED < STREAMS)
        mix = load_products(of_row, 2 * STREAMS + cell, existing, inverse, VALUES, BLOCKS, PADDED_BLOCKS)
        mix = mix * tl.load(scale + 2) + tl.load(base + 2 * STREAMS + cell, existing, 0.0)
        mix, valid = tl.reshape(mix, [PADDED, PADDED]), there[:, None] & there[None, :]
        mix = tl.where(there[None, :], mix, float("-inf"))
        mix = tl.exp(mix - tl.max(mix, 1)[:, None])
        mix = tl.where(valid, mix / tl.sum(mix, 1)[:, None] + MIX_EPS, 0.0)
        mix /= tl.sum(mix, 0)[None, :] + MIX_EPS
        for _ in range(ITERATIONS - 1):
            mix /= tl.sum(mix, 1)[:, None] + MIX_EPS
            mix /= tl.sum(mix, 0)[None, :] + MIX_EPS
        tl.store(found + STREAMS + stream[:, None] * STREAMS + stream[None, :], mix, valid)
