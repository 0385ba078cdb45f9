"""Launches a tower's operations between products. All tensors are contiguous; `reference.py` specifies the results."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from moeserve.kernels.launch import next_power_of_2
from moeserve.kernels.tower.triton import (
    add_product_kernel,
    gelu_kernel,
    layer_norm_kernel,
    split_heads_kernel,
)

MOST_ROWS: Final = 4  # of a program; patches are a multiple of it in all towers with tokens of 2 x 2 patches
GELU_COLUMNS: Final = 1024
WARPS: Final = 8


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, *, is_exact: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns LayerNorm(x) in `dtype`, of x [n, cols] with weight and bias [cols], all float32; and with `is_exact`
    the part that this rounding removes, in `dtype`. eps: added to the variance under the root."""
    cols, rows = x.shape[1], _rows(len(x))
    y = torch.empty_like(x, dtype=dtype)
    rest = torch.empty_like(y) if is_exact else None
    layer_norm_kernel(
        (len(x) // rows,), x, weight, bias, y, rest, cols, eps, rows, next_power_of_2(cols), num_warps=WARPS
    )
    return y, rest


def split_heads(
    first: Tensor,
    rest: Tensor | None,
    bias: Tensor | None,
    turns: tuple[Tensor, Tensor] | None,
    heads: int,
    dtype: torch.dtype,
) -> Tensor:
    """Returns q, k and v in `dtype`, [3, n, heads, cols / heads]: first + rest + bias, divided by head, with q and k
    rotated. first, rest: float32 [n, 3 * cols], the product in two parts; rest may be None. bias: float32 [3 * cols] or
    None. turns: cos and sin, float32 [n, cols / heads / 2] each; None: nothing rotates."""
    n, cols = len(first), first.shape[1] // 3
    out = torch.empty(3, n, heads, cols // heads, dtype=dtype, device=first.device)
    cos, sin = (None, None) if turns is None else turns
    rows, half = _rows(n), cols // heads // 2
    split_heads_kernel(
        (n // rows, 3), first, rest, bias, cos, sin, out,
        heads, half, rows, next_power_of_2(heads), next_power_of_2(half), num_warps=WARPS,
    )  # fmt: skip
    return out


def gelu(product: Tensor, bias: Tensor | None, approximate: str, dtype: torch.dtype) -> Tensor:
    """Returns gelu(product + bias) in `dtype`, of float32 product [n, cols] and bias [cols]. approximate: see torch's
    `gelu`."""
    cols, rows = product.shape[1], _rows(len(product))
    out = torch.empty_like(product, dtype=dtype)
    grid = len(product) // rows, -(-cols // GELU_COLUMNS)
    gelu_kernel(grid, product, bias, out, cols, approximate == "tanh", rows, GELU_COLUMNS, num_warps=WARPS)
    return out


def add_product(x: Tensor, product: Tensor, bias: Tensor | None) -> None:
    """Computes x += product + bias, all float32."""
    cols, rows = x.shape[1], _rows(len(x))
    add_product_kernel(
        (len(x) // rows,), x, product, bias, cols, rows, next_power_of_2(cols), num_warps=WARPS
    )


def _rows(n: int) -> int:
    return MOST_ROWS if n % MOST_ROWS == 0 else 1
