"""Prepares activations for integer_gemm.py: float16 in the order of its products, the sums of each group's columns, and
a row's factor.

A row is multiplied by the power of two that brings its largest magnitude to 512 .. 1023, so that float16 neither
overflows nor loses more than 2^-34 of that magnitude; `factor` undoes it.

A quad's lane t has the codes of part t. Place w * 32 + h * 16 + i * 8 + t * 2 + j of a K block of 128 columns is column
(2 t + h) * 16 + w * 4 + 2 j + i: the two nibbles' columns of a word are 16 apart (h), its bytes' next to each other.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def columns_at(place):
    """Returns the column of a row that the integer products read at each of the given places (int32), by the order in
    the head of this file."""
    p = place % 128
    w, h, i, t, j = p // 32, p // 16 % 2, p // 8 % 2, p // 2 % 4, p % 2
    return place - p + (t * 2 + h) * 16 + w * 4 + j * 2 + i


@triton.jit
def power_of_two_below(largest):
    """Returns float32 2^n with 2^n <= largest < 2^(n + 1), n limited to -100 .. 100. largest: float32, not negative."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 27), 227)
    return (exponent << 23).to(tl.float32, bitcast=True)


@kernel
def integer_order_kernel(
    x, count, out, sums, factors, COLS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """For rows i < count[0] * TOP_K of x [n, COLS]: out [n, COLS] float16 and factors [n] float32; sums float16 [n,
    COLS / 16]: for each super-block the sums of its 8 groups, then the rounding errors of these sums. Grid (n,); BLOCK:
    a power of two, at least COLS."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0)
    if i >= tl.load(count) * TOP_K:
        return
    row = x + i.to(tl.int64) * COLS
    place = tl.arange(0, BLOCK)
    there = place < COLS
    numbers = tl.load(row + place, there, 0.0).to(tl.float32)
    unit = power_of_two_below(tl.max(tl.abs(numbers), 0))
    scale = 512.0 / unit
    tl.store(factors + i, unit * (1.0 / 512.0))
    ordered = tl.load(row + columns_at(place), there, 0.0).to(tl.float32)
    tl.store(out + i.to(tl.int64) * COLS + place, (ordered * scale).to(tl.float16), there)
    rounded = (numbers * scale).to(tl.float16).to(tl.float32)
    total = tl.sum(tl.reshape(rounded, [BLOCK // 32, 32]), 1)
    near = total.to(tl.float16)
    group = tl.arange(0, BLOCK // 32)
    at = sums + i.to(tl.int64) * (COLS // 16) + group // 8 * 16 + group % 8
    tl.store(at, near, group < COLS // 32)
    tl.store(at + 8, (total - near.to(tl.float32)).to(tl.float16), group < COLS // 32)
