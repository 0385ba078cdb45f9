"""Gathers activations in the order of a matrix's columns (quantised in act-order), in one launch; one program per
row of the result."""

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
def gather_columns_kernel(
    x, order, ids, count, y, codes, scales, TOP_K: tl.constexpr, STRIDE: tl.constexpr, COLS: tl.constexpr,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y[i] = x[i, order]; with ids, y[i * TOP_K + j] = x[i, order[ids[i, j]]], for rows i < count[0] and ids
    that are not negative. Grid (rows * TOP_K). x [n, COLS]; order int32 [COLS], or [experts, COLS] with ids int32 [n,
    TOP_K], rows STRIDE apart; y [n * TOP_K, COLS] of x's dtype; codes with scales (y quantised) are optional. SIZE: a
    power of two that holds a row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    route = tl.program_id(0).to(tl.int64)
    row = route // TOP_K
    if row >= tl.load(count):
        return
    if ids is not None:
        expert = tl.load(ids + row * STRIDE + route % TOP_K).to(tl.int64)
        if expert < 0:
            return
        order += expert * COLS
    c = tl.arange(0, SIZE)
    live = c < COLS
    value = tl.load(x + row * COLS + tl.load(order + c, live, 0), live, 0.0)
    tl.store(y + route * COLS + c, value, live)
    if codes is not None:
        at = codes + route * COLS, scales + route * (COLS // 32)
        store_quantized(value.to(tl.float32), at[0], at[1], 0, COLS, SIZE)


def gather_columns(
    x: Tensor, order: Tensor, count: Tensor, y: GpuActivations, ids: Tensor | None = None
) -> None:
    """Computes y[i] = x[i, order] for i < count[0]; with ids, int32 [n, top_k], y[i * top_k + j] = x[i, order[ids[i,
    j]]], and nothing for a negative id. x [n, cols], cols a multiple of 32 if y has codes; order int32 [cols] or
    [experts, cols]; ids may be columns of a wider tensor; y.x has x's dtype."""
    assert y.x is not None
    n, cols = x.shape
    top_k, stride = (1, 1) if ids is None else (ids.shape[1], ids.stride(0))
    gather_columns_kernel(
        (n * top_k,), x, order, ids, count, y.x, y.codes, y.scales, top_k, stride, cols,
        max(32, triton.next_power_of_2(cols)), pdl(), num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip
