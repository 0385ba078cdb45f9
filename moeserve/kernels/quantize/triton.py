"""Quantises activations to int8 with a scale per group of 32 columns, in kernels: `reference.py` has the
arithmetic.

On the GPU, codes and scales are two tensors: int8 [n, cols] and float32 [n, cols / 32].
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(32)


@triton.jit
def quantize_groups(x):
    """Quantises float32 [groups, 32] to int8 codes [groups, 32] and float32 scales [groups]."""
    largest = tl.max(tl.abs(x), axis=1)
    inverse = tl.where(largest > 0, 127.0 / largest, 0.0)
    # Adding 1.5 * 2^23 rounds to an integer, ties to even, as the reference does.
    codes = (x * inverse[:, None] + 12582912.0) - 12582912.0
    return codes.to(tl.int8), largest / 127.0


@triton.jit
def store_quantized(x, codes, scales, first, limit, SIZE: tl.constexpr):
    """Quantises float32 x [SIZE], columns `first` .. limit - 1 of a row. codes, scales: pointers to the row."""
    groups: tl.constexpr = SIZE // GROUP
    q, s = quantize_groups(tl.reshape(x, [groups, GROUP]))
    column = first + tl.arange(0, groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(codes + column, q, column < limit)
    group = first // GROUP + tl.arange(0, groups)
    tl.store(scales + group, s, group < limit // GROUP)
