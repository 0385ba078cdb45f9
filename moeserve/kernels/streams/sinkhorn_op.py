"""Launches a residual of streams that are mixed on a GPU: `sinkhorn.py` has the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.norm.op import norm_warps
from moeserve.kernels.streams.product_sums import PRODUCT_COLUMNS
from moeserve.kernels.streams.sinkhorn import SinkhornMix
from moeserve.kernels.streams.sinkhorn_triton import (
    mixed_norm_kernel,
    mixed_products_kernel,
    read_mixed_kernel,
)

COLUMNS = 1024  # of each stream, that a program mixes at once
PRODUCT_WARPS = 4  # of a program of `mixed_products`


@dataclass(frozen=True, slots=True)
class MixedBlock:
    """A block's output that is still to be added to the streams: extra[i] + sum_j weights[i, j] * parts[i, j]."""

    parts: Tensor | None  # [n, p, hidden], floats
    part_weights: Tensor | None  # float32 [n, p]; None: 1
    ids: Tensor | None  # int32 [n, p]: parts with negative ids are left out
    extra: Tensor | None  # float32 [n, hidden]
    weights: Tensor  # float32 [n, streams * (1 + streams)]: `read_mixed`'s of this block


def norm_mixed(
    x: Tensor,
    block: MixedBlock | None,
    rows: Tensor | None,
    streams: int,
    count: Tensor,
    eps: float,
    y: GpuActivations | None,
) -> None:
    """Mixes x's streams and adds the block's output to each, unless block is None; then y = x over the root mean square
    of all streams, for i < count[0]. x float32 [n, streams * hidden]; rows int32 [m]: only these rows of x are read,
    row rows[j] for output row j, and block must be None; None: all rows. y [m, streams * hidden]; None: only x changes.
    eps: added to the mean square under the norm's root."""
    assert block is None or rows is None
    hidden = x.shape[1] // streams
    some = x if y is None else y.codes if y.x is None else y.x
    assert some is not None
    columns = min(COLUMNS, next_power_of_2(hidden))
    mixed_norm_kernel(
        (len(some),), x, None if block is None else block.parts, None if block is None else block.part_weights,
        None if block is None else block.ids, None if block is None else block.extra,
        None if block is None else block.weights, rows, count, None if y is None else y.x,
        None if y is None else y.codes, None if y is None else y.scales,
        streams, hidden, 0 if block is None or block.parts is None else block.parts.shape[1], eps, columns, pdl(),
        num_warps=norm_warps(columns), launch_pdl=pdl(),
    )  # fmt: skip


def mixed_products(
    x: Tensor,
    block: MixedBlock | None,
    rows: Tensor | None,
    streams: int,
    count: Tensor,
    matrix: Tensor,
    sums: Tensor,
) -> None:
    """Mixes x's streams and adds the block's output to each, unless block is None, as `norm_mixed` does; leaves to
    `read_mixed` the products of a matrix with x over the root mean square, as sums over some columns, for i < count[0].
    matrix: floats [values, streams * hidden]; sums float32, of shape `product_sums`; x, block, rows: `norm_mixed`'s."""
    assert block is None or rows is None
    hidden, values = x.shape[1] // streams, len(matrix)
    mixed_products_kernel(
        sums.shape[:2], x, None if block is None else block.parts, None if block is None else block.part_weights,
        None if block is None else block.ids, None if block is None else block.extra,
        None if block is None else block.weights, rows, count, matrix, sums,
        streams, hidden, 0 if block is None or block.parts is None else block.parts.shape[1], values,
        next_power_of_2(values), PRODUCT_COLUMNS, pdl(), num_warps=PRODUCT_WARPS, launch_pdl=pdl(),
    )  # fmt: skip


def read_mixed(
    products: Tensor | None,
    x: Tensor,
    rows: Tensor | None,
    mix: SinkhornMix | None,
    norm: Tensor,
    eps: float,
    count: Tensor,
    y: GpuActivations,
    exact: Tensor | None,
    weights: Tensor | None,
) -> None:
    """Computes y[i] = RMSNorm(a weighted sum of x[rows[i]]'s streams) * norm, for i < count[0]; weights[i] = the
    weights of the block's output and the mix, by which `norm_mixed` adds it.

    products float32 [m, streams * (2 + streams)], or `mixed_products`'s sums; x float32 [n, streams * hidden]; rows
    int32 [m] or None: row i; norm float32 [hidden]; y [m, hidden]; exact float32 [m, hidden], y unrounded; weights
    float32 [m, streams * (1 + streams)]. Before the head weights is None, and products [m, streams] or sums of these;
    or products and mix are None: y is of the streams' mean. eps: added to the mean square under the norm's root."""
    assert (products is None) == (mix is None)
    some, hidden = y.codes if y.x is None else y.x, len(norm)
    assert some is not None
    streams, size = x.shape[1] // hidden, next_power_of_2(hidden)
    blocks = products.shape[1] if products is not None and products.dim() == 3 else 0
    base, scale, *constants = (None, None, 0.0, 0) if mix is None else mix
    read_mixed_kernel(
        (len(some),), products, x, rows, base, scale, norm, count, y.x, y.codes, y.scales, exact, weights,
        streams, hidden, *constants, eps, size, next_power_of_2(streams), blocks, next_power_of_2(max(1, blocks)),
        pdl(), num_warps=norm_warps(size), launch_pdl=pdl(),
    )  # fmt: skip
