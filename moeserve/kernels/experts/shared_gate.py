"""The factor of a shared expert's output (Qwen2-MoE: https://arxiv.org/abs/2407.10671)."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@kernel
def shared_gate_kernel(
    x, weight, count, weights, ids,
    COLS: tl.constexpr, STRIDE: tl.constexpr, IDS_STRIDE: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes weights[i * STRIDE] = sigmoid(weight . x[i]), or 1 without weight float32 [COLS], for rows i < count[0]
    of x [n, COLS]. A program per row of x. ids int32, optional: ids[i * IDS_STRIDE] = 0 for these rows, -1 for the
    others."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    live = i < tl.load(count)
    if ids is not None:
        tl.store(ids + i * IDS_STRIDE, tl.where(live, 0, -1))
    gate = tl.full([], 1.0, tl.float32)
    if weight is not None:
        c = tl.arange(0, SIZE)
        row = tl.load(x + i * COLS + c, live & (c < COLS), 0.0).to(tl.float32)
        gate = 1.0 / (1.0 + tl.exp(-tl.sum(row * tl.load(weight + c, c < COLS, 0.0), 0)))
    tl.store(weights + i * STRIDE, gate, live)
