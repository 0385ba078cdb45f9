"""Hyper-connections in Triton: `reference.py` has the arithmetic.

A row has STREAMS vectors of HIDDEN numbers, one after another. Programs that need a whole stream have one row and one
stream; the mix has a row and a block of columns.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.norm.parts import add_parts
from moeserve.kernels.norm.triton import store_activations
from moeserve.kernels.quantize.triton import store_quantized


@kernel
def stream_norm_kernel(
    x, parts, part_weights, part_ids, extra, inject, rows, count, weight, y, codes, scales, inverse,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, P: tl.constexpr, INJECT_STRIDE: tl.constexpr, EPS: tl.constexpr,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes x[i, s] += 2 sigmoid(inject[i, s] / STREAMS) * block[i] with block[i] = extra[i] + sum_j
    part_weights[i, j] * parts[i, j]; then y = RMSNorm(x[i, s]) * weight[s]. Grid (m, STREAMS), for rows i < count[0].

    x float32 [n, STREAMS * HIDDEN]; parts [n, P, HIDDEN]; parts whose part_ids [n, P] are negative do not count; extra
    float32 [n, HIDDEN]; inject float32, rows INJECT_STRIDE apart; None: x is not changed. rows int32 [m]: output row i
    is computed from row rows[i], and x stays unchanged. weight float32 [STREAMS, HIDDEN]. y and codes with scales [m,
    STREAMS * HIDDEN], each optional; inverse float32 [m, STREAMS]: 1 / root mean square. None of these: only x is
    written. SIZE: HIDDEN or the power of two above.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, stream = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    row = i.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + i).to(tl.int64)
    width: tl.constexpr = STREAMS * HIDDEN
    c = tl.arange(0, SIZE)
    live = c < HIDDEN
    at = x + row * width + stream * HIDDEN + c
    value = tl.load(at, live, 0.0)
    if inject is not None:
        block = tl.zeros([SIZE], tl.float32)
        if extra is not None:
            block += tl.load(extra + row * HIDDEN + c, live, 0.0)
        block = add_parts(block, parts, part_weights, part_ids, row, c, live, HIDDEN, P, P)
        logit = tl.load(inject + row * INJECT_STRIDE + stream)
        value += 2.0 / (1.0 + tl.exp(-logit / STREAMS)) * block
        if rows is None:
            tl.store(at, value, live)
    if inverse is not None:
        scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + EPS)
        normed = value * scale * tl.load(weight + stream * HIDDEN + c, live, 0.0)
        out = i.to(tl.int64)
        tl.store(inverse + out * STREAMS + stream, scale)
        first = stream * HIDDEN
        if y is not None:
            tl.store(y + out * width + first + c, normed.to(y.dtype.element_ty), live)
        if codes is not None:
            store_quantized(
                normed, codes + out * width, scales + out * (width // 32), first, first + HIDDEN, SIZE
            )


@kernel
def scaled_silu_kernel(
    x, count, y, codes, scales,
    FACTOR: tl.constexpr, COLS: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y = silu(x * FACTOR) for rows below count[0]. x float32, rows of COLS, STRIDE apart; y and codes with
    scales [n, COLS], each optional. SIZE: COLS or the power of two above. Grid (n)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    row = i.to(tl.int64)
    c = tl.arange(0, SIZE)
    live = c < COLS
    value = tl.load(x + row * STRIDE + c, live, 0.0) * FACTOR
    value = value / (1.0 + tl.exp(-value))
    store_activations(value, y, codes, scales, row, COLS, SIZE)


@kernel
def mix_kernel(
    gate, x, rows, weight, inverse, count, y, codes, scales, exact,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y[i] = the mean over the streams of sigmoid(gate[i, s]) * normed[i, s], for i < count[0], with
    normed[i, s] = x[rows[i], s] * inverse[i, s] * weight[s]. Grid (m, blocks of HIDDEN).

    gate [m, STREAMS * HIDDEN]; x float32 [n, STREAMS * HIDDEN]; rows int32 [m], None: row i; weight float32 [STREAMS,
    HIDDEN]; inverse float32 [m, STREAMS]: stream_norm_kernel's. y, codes with scales, exact float32: [m, HIDDEN], each
    optional."""
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
    first = tl.program_id(1) * BLOCK
    c = first + tl.arange(0, BLOCK)
    live = c < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(STREAMS):
        at = stream * HIDDEN + c
        value = tl.load(x + row * STREAMS * HIDDEN + at, live, 0.0) * tl.load(weight + at, live, 0.0)
        opened = tl.load(gate + out * STREAMS * HIDDEN + at, live, 0.0).to(tl.float32)
        total += value * tl.load(inverse + out * STREAMS + stream) / (1.0 + tl.exp(-opened))
    total *= 1.0 / STREAMS
    if y is not None:
        tl.store(y + out * HIDDEN + c, total.to(y.dtype.element_ty), live)
    if exact is not None:
        tl.store(exact + out * HIDDEN + c, total, live)
    if codes is not None:
        store_quantized(total, codes + out * HIDDEN, scales + out * (HIDDEN // 32), first, HIDDEN, BLOCK)
