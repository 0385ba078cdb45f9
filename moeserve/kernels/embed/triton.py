"""Rows of the token embedding, dequantised from planes: one table serves as a tied output head too."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.linear.gemm import field_weights, load_parts


@kernel
def embed_kernel(
    ids, count, codes, scales, supers, x,
    COLS: tl.constexpr, F: tl.constexpr, UB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x[i] = row ids[i], float32 [n, COLS]; grid (n, steps): a step is one low part of UB units, or 16 * UB floats."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, step = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    x += i.to(tl.int64) * COLS
    r = tl.load(ids + i) + tl.zeros([1], tl.int32)
    b = tl.arange(0, UB * 16)
    if F is None:
        k = step * (UB * 16) + b
        row = tl.load(codes + r.to(tl.int64)[:, None] * COLS + k[None, :], (k < COLS)[None, :], 0.0)
        tl.store(x + k[None, :], row.to(tl.float32), (k < COLS)[None, :])
    else:
        low, high, words, d, live = load_parts(codes, scales, supers, r, step, COLS, F, UB)
        for j in tl.static_range(8 // F.low_bits):
            f = step % F.low_bits * (8 // F.low_bits) + j
            k = (step // F.low_bits * UB + b // 16) * 128 + f * 16 + b % 16
            w = field_weights(low, high, words, d, step % F.low_bits, j, live, F, UB)
            tl.store(x + k[None, :], w, (k < COLS)[None, :])
