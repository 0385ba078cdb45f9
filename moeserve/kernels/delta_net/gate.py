"""The output gate of a mixer, as Triton kernels; one program per row and head."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.quantize.triton import store_quantized


@kernel
def gated_norm_kernel(
    o, z, norm, count, y, codes, scales,
    Z_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr,
    SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y = RMSNorm(o) * norm * silu(z) per head, or sigmoid(z) with SIGMOID, for the rows below count[0]. o
    [n, HEADS * DIM]; z, rows Z_STRIDE apart; norm float32 [DIM]. y, and codes with scales: [n, HEADS * DIM], each
    optional. Grid (n, HEADS)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, head = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    row = i.to(tl.int64)
    width: tl.constexpr = HEADS * DIM
    c = tl.arange(0, SIZE)
    live = c < DIM
    x = tl.load(o + row * width + head * DIM + c, live, 0.0).to(tl.float32)
    gate = tl.load(z + row * Z_STRIDE + head * DIM + c, live, 0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / DIM + EPS) * tl.load(norm + c, live, 0.0)
    x *= (1.0 if SIGMOID else gate) / (1.0 + tl.exp(-gate))
    if y is not None:
        tl.store(y + row * width + head * DIM + c, x.to(y.dtype.element_ty), live)
    if codes is not None:
        first = head * DIM
        store_quantized(x, codes + row * width, scales + row * (width // 32), first, first + DIM, SIZE)


@kernel
def sigmoid_mul_kernel(
    x, gate, WIDTH: tl.constexpr, GATE_STRIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Computes x [n, WIDTH] *= sigmoid(gate) for all rows. gate: rows GATE_STRIDE apart. Grid (n, blocks of a row)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < WIDTH
    value = tl.load(x + row * WIDTH + c, live, 0.0).to(tl.float32)
    g = tl.load(gate + row * GATE_STRIDE + c, live, 0.0).to(tl.float32)
    tl.store(x + row * WIDTH + c, (value * (1.0 / (1.0 + tl.exp(-g)))).to(x.dtype.element_ty), live)


@kernel
def sigmoid_gate_kernel(
    x, gate, count, codes, scales,
    GATE_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, BY_HEAD: tl.constexpr,
    SOFTPLUS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes x [n, HEADS * DIM] *= sigmoid(gate), or softplus(gate), for the rows below count[0]; codes with scales,
    optional: the product, quantised. gate: rows GATE_STRIDE apart, as wide as x, or with BY_HEAD of HEADS numbers.
    Grid (n, HEADS)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, head = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    row = i.to(tl.int64)
    width: tl.constexpr = HEADS * DIM
    c = tl.arange(0, SIZE)
    live = c < DIM
    value = tl.load(x + row * width + head * DIM + c, live, 0.0).to(tl.float32)
    if BY_HEAD:
        g = tl.load(gate + row * GATE_STRIDE + head).to(tl.float32)
    else:
        g = tl.load(gate + row * GATE_STRIDE + head * DIM + c, live, 0.0).to(tl.float32)
    if SOFTPLUS:
        value *= tl.where(g > 20.0, g, tl.log(1.0 + tl.exp(tl.minimum(g, 20.0))))
    else:
        value *= 1.0 / (1.0 + tl.exp(-g))
    tl.store(x + row * width + head * DIM + c, value.to(x.dtype.element_ty), live)
    if codes is not None:
        first = head * DIM
        store_quantized(value, codes + row * width, scales + row * (width // 32), first, first + DIM, SIZE)
