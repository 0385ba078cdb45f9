"""The product of activations with one weight matrix, or with two matrices side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.linear.gather_columns import gather_columns
from moeserve.kernels.linear.integers import DenseIntegers, IntegerRows
from moeserve.kernels.linear.large_batch import UnpackScratch, can_unpack, large_batch_linear
from moeserve.kernels.linear.op import linear
from moeserve.kernels.linear.operands import weight_of
from moeserve.models.blocks.gpu.arena_views import activations, part_of
from moeserve.models.loading.gpu_weights import plane_tensors
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.step_buffers import SMALL_BATCH_ROWS


@dataclass(frozen=True, slots=True)
class DenseWorkspace:
    """A step's buffers for products with whole matrices. A field is None if the step has too few or too many rows
    for it."""

    unpack_scratch: UnpackScratch | None  # weights are unpacked into it if they fit
    integers: DenseIntegers | None  # for matrices that have them
    # [1, n]: for inputs in the order of a matrix's columns; None: the model has no orders.
    gathered: GpuActivations | None = None


NO_WORKSPACE = DenseWorkspace(None, None)


def dense_workspace(
    views: dict[str, Tensor], unpack_scratch: UnpackScratch | None, floats: torch.dtype
) -> DenseWorkspace:
    """Returns the workspace of dense products. views: the step's buffers. floats: dtype that the tensor cores
    multiply."""
    gathered = activations(views, "gathered") if "gathered" in views else None
    if "integer_y" not in views or floats != torch.bfloat16:
        return DenseWorkspace(unpack_scratch, None, gathered)
    rows = integer_rows(views, "integer_y")
    only_wide = len(rows.x) <= SMALL_BATCH_ROWS
    integers = DenseIntegers(rows, views["integer_partials"], only_wide=only_wide)
    return DenseWorkspace(unpack_scratch, integers, gathered)


def integer_rows(views: dict[str, Tensor], name: str) -> IntegerRows:
    """Returns the buffers `name`, `name`_sums and `name`_factors of the workspace as rows of integers."""
    return IntegerRows(views[name], views[f"{name}_sums"], views[f"{name}_factors"])


def multiply(
    weights: MergedLinear,
    x: GpuActivations,
    count: Tensor,
    out: Tensor,
    space: DenseWorkspace = NO_WORKSPACE,
    ordered: IntegerRows | None = None,
) -> None:
    """Launches out = x W^T + bias. out: [rows, weights.rows]. count: int32 [1], number of valid rows. ordered: x by
    `DenseIntegers.order`, if that was launched before; only for a matrix without a column order."""
    if weights.order is not None:
        x = in_order(x, weights.order, count, space)
    _multiply(weights, x, count, out, space, ordered)


def in_order(
    x: GpuActivations, order: Tensor, count: Tensor, space: DenseWorkspace, ids: Tensor | None = None
) -> GpuActivations:
    """Launches the gathering of x's columns, by row or, with ids, by route: `gather_columns`. The result is valid
    until the next call. count: int32 [1] on the device, the number of valid rows."""
    assert x.x is not None
    assert space.gathered is not None
    rows, cols = x.x.shape
    gathered = part_of(space.gathered, rows if ids is None else ids.numel(), cols)
    gather_columns(x.x, order, count, gathered, ids)
    return gathered


def _multiply(
    weights: MergedLinear,
    x: GpuActivations,
    count: Tensor,
    out: Tensor,
    space: DenseWorkspace,
    ordered: IntegerRows | None,
) -> None:
    first, second = weights.first, weights.second
    if takes_integers(weights, x, space):
        assert space.integers is not None
        assert x.x is not None
        rows = space.integers.order(x.x, count) if ordered is None else ordered
        space.integers.multiply(rows, (first,) if second is None else (first, second), out)
        return
    scratch = space.unpack_scratch
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
    space: DenseWorkspace = NO_WORKSPACE,
) -> list[Tensor]:
    """Launches the products of x [n, cols] with the matrices. Returns them split into [n, width] for each of `widths`:
    views of `out`, a flat buffer with room for all. count: int32 [1] on the device, the number of valid rows."""
    n = rows_of(x)
    pieces: list[Tensor] = []
    at = 0
    ordered, gathered, order = None, x, None
    if space.integers is not None and any(m.order is None and takes_integers(m, x, space) for m in weights):
        assert x.x is not None
        ordered = space.integers.order(x.x, count)
    for matrix in weights:
        if matrix.order is not None and matrix.order is not order:
            gathered, order = in_order(x, matrix.order, count, space), matrix.order
        product = out[at : at + n * matrix.rows].view(n, matrix.rows)
        at += product.numel()
        if matrix.order is None:
            _multiply(matrix, x, count, product, space, ordered)
        else:
            _multiply(matrix, gathered, count, product, space, None)
        column = 0
        while column < matrix.rows:
            width = widths[len(pieces)]
            pieces.append(product[:, column : column + width])
            column += width
    return pieces


def takes_integers(weights: MergedLinear, x: GpuActivations, space: DenseWorkspace) -> bool:
    """Returns whether a product is computed with weights as integers."""
    if space.integers is None or x.x is None or weights.bias is not None:
        return False
    first, second = weights.first, weights.second
    return space.integers.takes(first) and (second is None or space.integers.takes(second))


def rows_of(x: GpuActivations) -> int:
    some = x.codes if x.x is None else x.x
    assert some is not None
    return len(some)
