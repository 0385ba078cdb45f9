"""Streams that are mixed by doubly stochastic matrices, in Triton: `sinkhorn.py` has the arithmetic.

A row has STREAMS vectors of HIDDEN numbers, one after another, and is one program's: its norm is over all of them.
"""

# mypy: ignore-errors

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
    of_row = weights
    if weights is not None:
        of_row += row * STREAMS * (1 + STREAMS)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, HIDDEN, BLOCK):
        c = first + tl.arange(0, BLOCK)
        live = c < HIDDEN
        at = x + row * width + c
        if weights is not None:
            block = block_output(parts, part_weights, part_ids, extra, row, c, live, HIDDEN, P, BLOCK)
            mixed = ()
            for s in tl.static_range(STREAMS):
                total = tl.load(of_row + s) * block
                for j in tl.static_range(STREAMS):
                    share = tl.load(of_row + STREAMS + j * STREAMS + s)
                    total += share * tl.load(at + j * HIDDEN, live, 0.0)
                mixed = mixed + (total,)  # noqa: RUF005 (Triton compiles no starred tuples)
            for s in tl.static_range(STREAMS):
                squares += mixed[s] * mixed[s]
                if rows is None:
                    tl.store(at + s * HIDDEN, mixed[s], live)
        else:
            for s in tl.static_range(STREAMS):
                value = tl.load(at + s * HIDDEN, live, 0.0)
                squares += value * value
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
def read_mixed_kernel(
    products, x, rows, base, scale, norm, count, y, codes, scales, exact, weights,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, MIX_EPS: tl.constexpr, ITERATIONS: tl.constexpr, EPS: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y[i] = RMSNorm(a weighted sum of x[rows[i]]'s streams) * norm; weights[i] = the weights of the block's
    output and the mix. Grid (m), for rows i < count[0].

    products float32 [m, STREAMS * (2 + STREAMS)], before the head (weights None) [m, STREAMS], or None: the mean of the
    streams is read; x float32 [n, STREAMS * HIDDEN]; rows int32 [m], None: row i; base, scale: SinkhornMix's; norm
    float32 [HIDDEN]; y, codes with scales, exact float32: [m, HIDDEN], each optional; weights float32 [m, STREAMS * (1
    + STREAMS)]. SIZE and PADDED: HIDDEN and STREAMS or the powers of two above."""
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
    of_row = products
    if weights is not None:
        of_row += out * STREAMS * (2 + STREAMS)
    elif products is not None:
        of_row += out * STREAMS
    c = tl.arange(0, SIZE)
    live = c < HIDDEN
    total = tl.zeros([SIZE], tl.float32)
    for s in tl.static_range(STREAMS):
        if products is None:
            before = 1.0 / STREAMS
        else:
            before = tl.sigmoid(tl.load(of_row + s) * tl.load(scale) + tl.load(base + s)) + MIX_EPS
        total += before * tl.load(x + (row * STREAMS + s) * HIDDEN + c, live, 0.0)
    store_norm(total, tl.load(norm + c, live, 0.0), y, codes, scales, exact, out, HIDDEN, EPS, SIZE)
    if weights is not None:
        stream = tl.arange(0, PADDED)
        found = weights + out * STREAMS * (1 + STREAMS)
        there = stream < STREAMS
        logit = tl.load(of_row + STREAMS + stream, there, 0.0) * tl.load(scale + 1)
        added = 2.0 * tl.sigmoid(logit + tl.load(base + STREAMS + stream, there, 0.0))
        tl.store(found + stream, added, there)
        cell = stream[:, None] * STREAMS + stream[None, :]  # from, to
        valid = there[:, None] & there[None, :]
        mix = tl.load(of_row + 2 * STREAMS + cell, valid, 0.0) * tl.load(scale + 2)
        mix += tl.load(base + 2 * STREAMS + cell, valid, 0.0)
        mix = tl.where(there[None, :], mix, float("-inf"))
        mix = tl.exp(mix - tl.max(mix, 1)[:, None])
        mix = tl.where(valid, mix / tl.sum(mix, 1)[:, None] + MIX_EPS, 0.0)
        mix /= tl.sum(mix, 0)[None, :] + MIX_EPS
        for _ in range(ITERATIONS - 1):
            mix /= tl.sum(mix, 1)[:, None] + MIX_EPS
            mix /= tl.sum(mix, 0)[None, :] + MIX_EPS
        tl.store(found + STREAMS + cell, mix, valid)
