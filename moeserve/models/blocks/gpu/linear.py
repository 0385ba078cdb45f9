"""The product of activations with one weight matrix, or with two matrices side by side, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.linear.large_batch import UnpackScratch, can_unpack, large_batch_linear
from moeserve.kernels.linear.op import linear, weight_of
from moeserve.models.loading.gpu_weights import MergedLinear, plane_tensors


def multiply(
    weights: MergedLinear,
    x: GpuActivations,
    count: Tensor,
    out: Tensor,
    scratch: UnpackScratch | None = None,
) -> None:
    """Launches out = x W^T + bias. out: [rows, weights.rows]. count: int32 [1], number of valid rows. scratch: a
    large step's buffer; the weights are unpacked into it if they fit."""
    first, second = weights.first, weights.second
    if scratch is not None and scratch.fits(weights.rows, first.cols):
        weight = weight_of(plane_tensors(first), int(first.type), first.cols)
        other = None if second is None else weight_of(plane_tensors(second), int(second.type), second.cols)
        if x.x is not None and can_unpack(weight) and x.x.dtype == scratch.floats.dtype:
            large_batch_linear(x.x, weight, other, count, out, scratch, bias=weights.bias)
            return
    linear(
        x.x, x.codes, x.scales, count, plane_tensors(first), int(first.type),
        None if second is None else plane_tensors(second), 0 if second is None else int(second.type), first.cols, out,
        bias=weights.bias,
    )  # fmt: skip


def multiply_all(
    weights: Sequence[MergedLinear],
    widths: Sequence[int],
    x: GpuActivations,
    count: Tensor,
    out: Tensor,
    scratch: UnpackScratch | None = None,
) -> list[Tensor]:
    """Launches the products of x [n, cols] with the matrices. Returns them split into [n, width] for each of
    `widths`: views of `out`, a flat buffer with room for all."""
    n = rows_of(x)
    pieces: list[Tensor] = []
    at = 0
    for matrix in weights:
        product = out[at : at + n * matrix.rows].view(n, matrix.rows)
        at += product.numel()
        multiply(matrix, x, count, product, scratch)
        column = 0
        while column < matrix.rows:
            width = widths[len(pieces)]
            pieces.append(product[:, column : column + width])
            column += width
    return pieces


def rows_of(x: GpuActivations) -> int:
    some = x.codes if x.x is None else x.x
    assert some is not None
    return len(some)
