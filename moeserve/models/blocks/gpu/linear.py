"""One launch of a product with a matrix, or with two side by side."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.linear.op import linear
from moeserve.models.loading.gpu_weights import MergedLinear, plane_tensors


def multiply(weights: MergedLinear, x: GpuActivations, count: Tensor, out: Tensor) -> None:
    """out = x W^T + bias. out: [rows, weights.rows]; count: int32 [1], the rows that exist."""
    first, second = weights.first, weights.second
    linear(
        x.x, x.codes, x.scales, count, plane_tensors(first), int(first.type),
        None if second is None else plane_tensors(second), 0 if second is None else int(second.type), first.cols, out,
        bias=weights.bias,
    )  # fmt: skip
