"""Products and attention in block floating point: each 128 numbers along the inner dimension share a float32 scale, and
each number is an int16 code. On the CPU, with AVX-512 VNNI, they take about half of float32's time.

Codes keep more than float16: the error of a product of random numbers is 1.0e-4 of its size, where inputs rounded to
float16 have 2.1e-4, and to bfloat16 1.7e-3.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from moeserve.kernels._C import BlockFloatMatrix, block_float_attention, has_block_float

__all__ = ["MOST_HEAD_DIM", "PackedMatrix", "attention", "has_block_float", "takes_heads"]

MOST_HEAD_DIM: Final = 128


class PackedMatrix:
    """A matrix that is multiplied from the right, x @ matrix.T, on torch's number of threads."""

    def __init__(self, matrix: Tensor) -> None:
        """matrix: float32 [out, in], copied. Raises RuntimeError without `has_block_float()`."""
        self._matrix = BlockFloatMatrix(matrix.contiguous(), torch.get_num_threads())

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns x W^T + bias, float32 [rows, out]. x: float32 [rows, in]; bias: float32 [out]. A block with a number
        that is not finite makes its row NaN."""
        out = torch.empty(len(x), self._matrix.rows)
        self._matrix.multiply(x.contiguous(), bias, out, torch.get_num_threads())
        return out


def takes_heads(dim: int) -> bool:
    """Returns whether `attention` supports heads of `dim` numbers."""
    return dim % 2 == 0 and dim <= MOST_HEAD_DIM


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention in which each row sees all rows. q, k, v: float32 [heads, rows, dim]; scale: of q's products with k,
    1 / sqrt(dim) if None. Returns float32 [rows, heads * dim]. Raises ValueError unless `takes_heads(dim)`."""
    heads, rows, dim = q.shape
    out = torch.empty(rows, heads * dim)
    block_float_attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        dim,
        1.0 / math.sqrt(dim) if scale is None else scale,
        out,
        torch.get_num_threads(),
    )
    return out
