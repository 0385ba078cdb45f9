"""A residual of several streams on a GPU, as launches on the current stream: the same as blocks/cpu/residual.py.

A block's output stays in a separate buffer until the next block reads the streams. That launch first adds the output,
with the weights that the block itself computed when it read the streams.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.streams import attended_op
from moeserve.kernels.streams.attended_op import PlacedBlock
from moeserve.kernels.streams.op import StreamBlock, add_to_streams, mix_streams, norm_streams, scaled_silu
from moeserve.kernels.streams.product_sums import PRODUCT_ROWS, product_sums
from moeserve.kernels.streams.sinkhorn_op import MixedBlock, mixed_products, norm_mixed, read_mixed
from moeserve.models.blocks.gpu.expert_run import PendingSum
from moeserve.models.blocks.gpu.linear import DenseWorkspace, multiply, multiply_all, rows_of
from moeserve.models.blocks.gpu.residual_workspace import (
    AttendedWorkspace,
    GatedStreamsWorkspace,
    SinkhornWorkspace,
    StreamsWorkspace,
)
from moeserve.models.loading.gpu_inputs import (
    GpuAttendedStreams,
    GpuSinkhornMix,
    GpuStreamMean,
    GpuStreamMix,
    GpuStreams,
)


def add_block(x: Tensor, pending: PendingSum, space: StreamsWorkspace, count: Tensor) -> None:
    """Launches x += the output of the block that last read the streams. Call it only if no later block reads the
    streams; otherwise that block's reading adds the output. count: int32 [1] on the device, the number of valid
    rows."""
    if isinstance(space, AttendedWorkspace):
        attended_op.add_block(x, _placed_block(pending, space), count)
    elif isinstance(space, SinkhornWorkspace):
        norm_mixed(x, MixedBlock(*pending, space.weights), None, space.count, count, 0.0, None)
    else:
        add_to_streams(x, _gated_block(pending, space), count)


def read_streams(
    w: GpuStreams,
    eps: float,
    x: Tensor,
    pending: PendingSum | None,
    rows: Tensor | None,
    count: Tensor,
    space: StreamsWorkspace,
    y: GpuActivations,
    exact: Tensor | None,
    dense: DenseWorkspace,
) -> None:
    """Launches x += the previous block's pending output, if any, and y = the next block's input, computed from x's
    streams. Leaves the weights for that block's output in the workspace. rows: int32, the rows that the head reads;
    None: all. exact: float32 [rows, hidden], receives y unrounded. eps: added to the mean square under the norm's
    root; count: int32 [1] on the device, the number of valid rows."""
    if isinstance(w, GpuStreamMean):
        assert pending is None  # the head reads streams that are complete
        read_mixed(None, x, rows, None, w.norm, eps, count, y, exact, None)
    elif isinstance(w, GpuAttendedStreams):
        assert isinstance(space, AttendedWorkspace)
        block = None if pending is None else _placed_block(pending, space)
        attended_op.attend_streams(x, block, rows, w.attention, count, eps, y, exact)
        space.place = w.attention.reading
    elif isinstance(w, GpuSinkhornMix):
        assert isinstance(space, SinkhornWorkspace)
        _read_mixed(w, eps, x, pending, rows, count, space, y, exact, dense)
    else:
        assert isinstance(space, GatedStreamsWorkspace)
        _read_gated(w, eps, x, pending, rows, count, space, y, exact, dense)


def _placed_block(pending: PendingSum, space: AttendedWorkspace) -> PlacedBlock:
    assert space.place is not None
    return PlacedBlock(*pending, space.place)


def _gated_block(pending: PendingSum, space: GatedStreamsWorkspace) -> StreamBlock:
    assert space.inject is not None
    return StreamBlock(*pending, space.inject)


def _read_gated(
    w: GpuStreamMix,
    eps: float,
    x: Tensor,
    pending: PendingSum | None,
    rows: Tensor | None,
    count: Tensor,
    space: GatedStreamsWorkspace,
    y: GpuActivations,
    exact: Tensor | None,
    dense: DenseWorkspace,
) -> None:
    block = None if pending is None else _gated_block(pending, space)
    norm_streams(x, block, rows, count, w.norm, eps, space.norm)
    low_rank, *inject = multiply_all(w.down, space.widths, space.norm.normed, count, space.products, dense)
    space.inject = inject[0] if inject else None
    scaled_silu(low_rank, 1.0 / len(w.norm), count, space.low_rank)
    multiply(w.up, space.low_rank, count, space.gate, dense)
    mix_streams(space.gate, x, rows, w.norm, space.norm.inverse, count, y, exact)


def _read_mixed(
    w: GpuSinkhornMix,
    eps: float,
    x: Tensor,
    pending: PendingSum | None,
    rows: Tensor | None,
    count: Tensor,
    space: SinkhornWorkspace,
    y: GpuActivations,
    exact: Tensor | None,
    dense: DenseWorkspace,
) -> None:
    block = None if pending is None else MixedBlock(*pending, space.weights)
    n, values = rows_of(y), w.product.rows
    if n <= PRODUCT_ROWS and w.product.is_floats:
        sums = product_sums(n, x.shape[1] // space.count, values)
        products = space.products[: prod(sums)].view(sums)
        mixed_products(x, block, rows, space.count, count, w.product.first.codes[0], products)
    else:
        norm_mixed(x, block, rows, space.count, count, eps, space.normed)
        (products,) = multiply_all([w.product], [values], space.normed, count, space.products, dense)
    weights = None if values == space.count else space.weights  # the head adds nothing
    read_mixed(products, x, rows, w.mix, w.norm, eps, count, y, exact, weights)
