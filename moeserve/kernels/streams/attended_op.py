"""Launches attention residuals on a GPU: `attended.py` has the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.norm.op import norm_warps
from moeserve.kernels.streams.attended_triton import attend_streams_kernel


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A block's output that is still to be added to a stream: extra[i] + sum_j weights[i, j] * parts[i, j]."""

    parts: Tensor | None  # [n, p, hidden], floats
    part_weights: Tensor | None  # float32 [n, p]; None: 1
    ids: Tensor | None  # int32 [n, p]: parts with negative ids are left out
    extra: Tensor | None  # float32 [n, hidden]
    place: Tensor  # int32 [3]: the block's `StreamReading`


@dataclass(frozen=True, slots=True)
class StreamAttention:
    """The weights with which a block attends to the streams of the residual (models whose residual has several
    streams)."""

    score: Tensor  # float32 [hidden]
    norm: Tensor  # float32 [hidden], of the sum
    reading: Tensor  # int32 [3]: a `StreamReading`


def add_block(x: Tensor, block: PlacedBlock, count: Tensor) -> None:
    """Adds the block's output to its stream, or puts it there, for i < count[0]. x float32 [n, streams * hidden]."""
    some = block.extra if block.parts is None else block.parts
    assert some is not None
    _launch(x, block, None, None, count, 0.0, None, None, some.shape[-1])


def attend_streams(
    x: Tensor,
    block: PlacedBlock | None,
    rows: Tensor | None,
    w: StreamAttention,
    count: Tensor,
    eps: float,
    y: GpuActivations,
    exact: Tensor | None,
) -> None:
    """Adds the block's output to x as `add_block` does, unless block is None; then computes y[i] = RMSNorm(the weighted
    sum of x[rows[i]]'s first streams) * norm, for i < count[0]. rows int32 [m]: without a block; None: row i. y [m,
    hidden]; exact float32 [m, hidden]: y before rounding. eps: added to the mean square under the norm's root."""
    assert block is None or rows is None
    _launch(x, block, rows, w, count, eps, y, exact, len(w.norm))


def _launch(
    x: Tensor,
    block: PlacedBlock | None,
    rows: Tensor | None,
    w: StreamAttention | None,
    count: Tensor,
    eps: float,
    y: GpuActivations | None,
    exact: Tensor | None,
    hidden: int,
) -> None:
    some = x if y is None else y.codes if y.x is None else y.x
    assert some is not None
    size = next_power_of_2(hidden)
    of_block = (
        (None,) * 5
        if block is None
        else (block.parts, block.part_weights, block.ids, block.extra, block.place)
    )
    of_y = (None,) * 3 if y is None else (y.x, y.codes, y.scales)
    score, reading, norm = (None,) * 3 if w is None else (w.score, w.reading, w.norm)
    attend_streams_kernel(
        (len(some),), x, *of_block, rows, score, reading, norm, count, *of_y, exact, x.shape[1] // hidden, hidden,
        0 if block is None or block.parts is None else block.parts.shape[1], eps, size, pdl(),
        num_warps=norm_warps(size), launch_pdl=pdl(),
    )  # fmt: skip
