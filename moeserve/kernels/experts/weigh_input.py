"""Multiplies a routed expert's input by the route's weight (Llama 4), in one launch; one program per row."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.launch import kernel, pdl
from moeserve.kernels.quantize.triton import store_quantized


@kernel
def weigh_input_kernel(
    x, weights, count, y, codes, scales, kept, STRIDE: tl.constexpr, COLS: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes y = weight * x for each row below count[0], moves the weight to `kept`, and replaces it by 1. Grid
    (rows). x float32 [n, COLS]; weights float32 [n], STRIDE apart; y [n, COLS], and codes with scales, each optional;
    kept float32 [n]. SIZE: a power of two that holds a row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count):
        return
    c = tl.arange(0, SIZE)
    live = c < COLS
    weight = tl.load(weights + row * STRIDE)
    value = tl.load(x + row * COLS + c, live, 0.0).to(tl.float32) * weight
    tl.store(y + row * COLS + c, value.to(y.dtype.element_ty), live)
    if codes is not None:
        store_quantized(value, codes + row * COLS, scales + row * (COLS // 32), 0, COLS, SIZE)
    tl.debug_barrier()  # every thread must have read the weight before it is replaced
    tl.store(kept + row, weight)
    tl.store(weights + row * STRIDE, 1.0)


def weigh_input(x: Tensor, weights: Tensor, count: Tensor, y: GpuActivations, kept: Tensor) -> None:
    """Computes y[i] = weights[i, 0] * x[i], then kept[i] = weights[i, 0] and weights[i, 0] = 1, for i < count[0]. x
    float32 [n, cols], cols a multiple of 32; weights float32 [n, 1], rows at any stride: a token has one route. kept
    float32 [n, 1]."""
    assert y.x is not None
    n, cols = x.shape
    weigh_input_kernel(
        (n,), x, weights, count, y.x, y.codes, y.scales, kept, weights.stride(0), cols,
        max(32, triton.next_power_of_2(cols)), pdl(), num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip
