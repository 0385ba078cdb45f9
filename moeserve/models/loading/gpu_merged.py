"""Merges the matrices that multiply the same input, so that a GPU computes their products in as few launches as their
types and column orders allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moeserve.kernels.planes import Planes
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.loading.orders import SharedOrders
from moeserve.models.sources.source import ModelSource


def load_merged(
    source: ModelSource, orders: SharedOrders, planes: Callable[..., Planes], names: Sequence[str]
) -> list[MergedLinear]:
    """Loads the matrices with these names, and returns them in this order as few products. Neighbours with equal type
    and column order become one matrix. Two such matrices share a product's launch if their column orders are equal and
    either both or none of them are quantised. planes: loads matrices of one type by their names, stacked."""
    groups: list[list[str]] = []
    order_of = {name: orders.of(source.tensors[name]) for name in names}
    for name in names:
        last = groups[-1][0] if groups else None
        if (
            last is not None
            and source.tensors[last].type == source.tensors[name].type
            and order_of[last] is order_of[name]
        ):
            groups[-1].append(name)
        else:
            groups.append([name])
    merged: list[MergedLinear] = []
    for group in groups:
        matrix, order = planes(*group), order_of[group[0]]
        before = merged[-1] if merged else None
        if (
            before is not None
            and before.second is None
            and before.first.quantised == matrix.quantised
            and before.order is order
        ):
            merged[-1] = replace(before, second=matrix)
        else:
            merged.append(MergedLinear(matrix, order=order))
    return merged


def with_biases(merged: list[MergedLinear], biases: list[Tensor]) -> list[MergedLinear]:
    """Returns the merged matrices with the biases (vectors, one number for each row) of all their parts, given in
    order."""
    pieces = torch.cat(biases).split([matrix.rows for matrix in merged])
    # Each part is copied to memory of its own, because kernels are compiled for aligned addresses.
    return [replace(m, bias=piece.clone()) for m, piece in zip(merged, pieces, strict=True)]
