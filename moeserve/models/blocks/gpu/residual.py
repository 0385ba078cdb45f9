"""A residual of several streams on a GPU, as launches on the current stream: the same as blocks/cpu/residual.py.

A block's output stays apart until the next block reads the streams; that launch adds it first, with the weights that
the block's own reading has left in `StreamsWorkspace.inject`.
"""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.streams.op import (
    StreamBlock,
    add_to_streams,
    mix_streams,
    norm_streams,
    scaled_silu,
)
from moeserve.models.blocks.gpu.expert_run import PendingSum
from moeserve.models.blocks.gpu.linear import DenseWorkspace, multiply, multiply_all
from moeserve.models.blocks.gpu.residual_workspace import StreamsWorkspace
from moeserve.models.loading.gpu_weights import GpuStreamMix


def pending_block(pending: PendingSum, space: StreamsWorkspace) -> StreamBlock:
    """Returns the output of the block that last read the streams, to be added to them."""
    assert space.inject is not None
    return StreamBlock(*pending, space.inject)


def add_block(x: Tensor, pending: PendingSum, space: StreamsWorkspace, count: Tensor) -> None:
    """Launches x += the block's output, where nothing reads the streams next."""
    add_to_streams(x, pending_block(pending, space), count)


def read_streams(
    w: GpuStreamMix,
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
    """Launches x += the pending output of the block before, if any, and y = what a block reads of x; leaves the weights
    of its output in space.inject. rows: int32, the rows that the head reads; None: all. exact: float32 [rows, hidden],
    y unrounded."""
    block = None if pending is None else pending_block(pending, space)
    norm_streams(x, block, rows, count, w.norm, eps, space.norm)
    low_rank, *inject = multiply_all(w.down, space.widths, space.norm.normed, count, space.products, dense)
    space.inject = inject[0] if inject else None
    scaled_silu(low_rank, 1.0 / len(w.norm), count, space.low_rank)
    multiply(w.up, space.low_rank, count, space.gate, dense)
    mix_streams(space.gate, x, rows, w.norm, space.norm.inverse, count, y, exact)
