"""Computes output(c * conv(b * x)) with b, c, x = in(y), as launches on the current stream: the same as
blocks/cpu/short_conv.py."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.short_conv.op import short_conv
from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.blocks.gpu.linear import multiply, multiply_all
from moeserve.models.blocks.gpu.workspace import GpuStateRows, GpuWorkspace
from moeserve.models.loading.gpu_weights import GpuShortConv
from moeserve.models.short_conv import ShortConvShape


def convolve(
    shape: ShortConvShape,
    w: GpuShortConv,
    state: StateLayer,
    rows: GpuStateRows,
    count: Tensor,
    s: GpuWorkspace,
    records: Tensor | None = None,
) -> None:
    """Launches the block. Reads s.y, the norm of x; writes the output to s.output and advances the sequences' states.
    count: int32 [1] on the device, the number of valid rows. records: where drafts' inputs are recorded."""
    assert s.short_conv is not None
    out = s.short_conv
    (projected,) = multiply_all([w.input], [shape.input_width], s.y, count, s.projected, s.dense)
    own_states = state.states[:, state.first :]
    short_conv(
        *(projected, w.conv, shape.heads, own_states, rows.sequences, count),
        *(out.x, out.codes, out.scales, records),
    )
    multiply(w.output, out, count, s.output.view(s.rows, -1), s.dense)
