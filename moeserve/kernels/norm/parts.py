"""The sum of a block's outputs that are still in parts."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_parts(
    total, parts, part_weights, part_ids, row, c, live, COLS: tl.constexpr, P: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """Returns total + sum_j part_weights[row, j] * parts[row, j] at columns c, without the parts whose part_ids are
    negative. parts [n, STRIDE, COLS], of which the first P count; part_weights, part_ids [n, STRIDE], or None."""
    for j in tl.static_range(P):
        part = tl.load(parts + (row * STRIDE + j) * COLS + c, live, 0.0).to(tl.float32)
        if part_weights is not None:
            part *= tl.load(part_weights + row * STRIDE + j)
        if part_ids is not None:
            part = tl.where(tl.load(part_ids + row * STRIDE + j) >= 0, part, 0.0)
        total += part
    return total
