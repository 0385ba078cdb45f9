"""Per-layer embeddings as Triton kernels: `reference.py` has the arithmetic."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.linear.gated import gelu_mul
from moeserve.kernels.norm.triton import store_activations


@kernel
def make_inputs_kernel(
    inputs, projected, weight, count,
    LAYERS: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes inputs = (inputs + RMSNorm(projected) * weight) / sqrt(2) for each layer's part, in the rows below
    count[0]. inputs float32, projected floats: [n, LAYERS * WIDTH]; weight float32 [WIDTH]. SIZE: WIDTH or the power
    of two above. Grid (n, LAYERS)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, layer = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    c = tl.arange(0, SIZE)
    live = c < WIDTH
    at = (i.to(tl.int64) * LAYERS + layer) * WIDTH + c
    value = tl.load(projected + at, live, 0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + EPS) * tl.load(weight + c, live, 0.0)
    value = (value + tl.load(inputs + at, live, 0.0)) * 0.7071067811865476
    tl.store(inputs + at, value, live)


@kernel
def gate_input_kernel(
    gate, inputs, count, y, codes, scales,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per row i < count[0]: y = gelu(gate) * inputs, by GELU's tanh form. gate: floats [n, WIDTH]; inputs:
    float32, rows STRIDE apart. y, and codes with scales: [n, WIDTH], each optional. SIZE: as above."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    if i >= tl.load(count):
        return
    row = i.to(tl.int64)
    c = tl.arange(0, SIZE)
    live = c < WIDTH
    of_gate = tl.load(gate + row * WIDTH + c, live, 0.0).to(tl.float32)
    value = gelu_mul(of_gate, tl.load(inputs + row * STRIDE + c, live, 0.0))
    store_activations(value, y, codes, scales, row, WIDTH, SIZE)
