"""Launches a residual of several streams (hyper-connections) on a GPU: `reference.py` has the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.norm.op import norm_warps
from moeserve.kernels.streams.triton import mix_kernel, scaled_silu_kernel, stream_norm_kernel

MIX_BLOCK = 512  # columns per program of the mix


@dataclass(frozen=True, slots=True)
class StreamBlock:
    """A block's output that is still to be added to the streams: extra[i] + sum_j weights[i, j] * parts[i, j]."""

    parts: Tensor | None  # [n, p, hidden], floats
    weights: Tensor | None  # float32 [n, p]; None: 1
    ids: Tensor | None  # int32 [n, p]: parts with negative ids are left out
    extra: Tensor | None  # float32 [n, hidden]
    inject: Tensor  # float32 [n, streams], rows at any stride: logits of the streams' weights


@dataclass(frozen=True, slots=True)
class StreamNorm:
    """The output buffers of `norm_streams`, for up to m rows."""

    normed: GpuActivations  # [m, streams * hidden]
    inverse: Tensor  # float32 [m, streams]: 1 / root mean square


def add_to_streams(x: Tensor, block: StreamBlock, count: Tensor) -> None:
    """Computes x[i, s] += 2 sigmoid(inject[i, s] / streams) * the block's output, for i < count[0]. x float32 [n,
    streams * hidden]."""
    _launch_norm(x, block, None, count, None, 0.0, block.inject.shape[1], None)


def norm_streams(
    x: Tensor,
    block: StreamBlock | None,
    rows: Tensor | None,
    count: Tensor,
    weight: Tensor,
    eps: float,
    out: StreamNorm,
) -> None:
    """Adds the block's output to x as `add_to_streams` does, unless block is None; then computes out = RMSNorm of each
    stream * weight, for i < count[0]. weight: float32 [streams, hidden]. rows int32 [m]: only these rows of x are read,
    row rows[j] for output row j, and block must be None; None: all rows. eps: added to the mean square under the norm's
    root."""
    assert block is None or rows is None
    _launch_norm(x, block, rows, count, weight, eps, len(weight), out)


def _launch_norm(
    x: Tensor,
    block: StreamBlock | None,
    rows: Tensor | None,
    count: Tensor,
    weight: Tensor | None,
    eps: float,
    streams: int,
    out: StreamNorm | None,
) -> None:
    hidden = x.shape[1] // streams
    size = next_power_of_2(hidden)
    y = GpuActivations(None, None, None) if out is None else out.normed
    stream_norm_kernel(
        (len(x) if out is None else len(out.inverse), streams), x,
        None if block is None else block.parts, None if block is None else block.weights,
        None if block is None else block.ids, None if block is None else block.extra,
        None if block is None else block.inject, rows, count, weight, y.x, y.codes, y.scales,
        None if out is None else out.inverse,
        streams, hidden, 0 if block is None or block.parts is None else block.parts.shape[1],
        0 if block is None else block.inject.stride(0), eps, size, pdl(),
        num_warps=norm_warps(size), launch_pdl=pdl(),
    )  # fmt: skip


def scaled_silu(x: Tensor, factor: float, count: Tensor, y: GpuActivations) -> None:
    """Computes y[i] = silu(x[i] * factor), for i < count[0]. x float32 [n, cols], rows at any stride; y: [n, cols]."""
    n, cols = x.shape
    scaled_silu_kernel(
        (n,), x, count, y.x, y.codes, y.scales, factor, cols, x.stride(0), next_power_of_2(cols), pdl(),
        num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip


def mix_streams(
    gate: Tensor,
    x: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    inverse: Tensor,
    count: Tensor,
    y: GpuActivations,
    exact: Tensor | None = None,
) -> None:
    """Computes y[i] = mean over the streams of sigmoid(gate[i, s]) * normed[i, s], for i < count[0], where normed is
    the norm of x[rows[i]] that `norm_streams` computed, from x so that it is not rounded.

    gate [m, streams * hidden], floats; x float32 [n, streams * hidden]; rows int32 [m] or None: row i; weight float32
    [streams, hidden]; inverse: StreamNorm.inverse. y [m, hidden]; exact float32 [m, hidden], y unrounded."""
    streams, hidden = weight.shape
    block = min(MIX_BLOCK, next_power_of_2(hidden))
    mix_kernel(
        (len(inverse), -(-hidden // block)), gate, x, rows, weight, inverse, count, y.x, y.codes, y.scales, exact,
        streams, hidden, block, pdl(), num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip
