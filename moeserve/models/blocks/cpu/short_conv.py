"""Computes x += output(c * conv(b * x)) with b, c, x projected from norm(x), queued on the pool's stream."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.blocks.cpu.residual import add_product, read_residual
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.loading.cpu_weights import CpuShortConv


def project_short_conv(stream: CpuStream, w: CpuShortConv, eps: float, n: int, space: CpuWorkspace) -> None:
    """Launches the product of norm(x). eps: added to the mean square under the norm's root; n: rows of the step."""
    assert space.short_conv is not None
    read_residual(stream, w.norm, eps, n, space)
    stream.linear(space.y, n, w.input, [space.short_conv.projected])


def convolve(
    stream: CpuStream,
    w: CpuShortConv,
    state: StateLayer,
    batch: CpuBatch,
    space: CpuWorkspace,
    pending: Tensor | None = None,
) -> None:
    """Launches the rest of a short-convolution block after `project_short_conv`: the gated convolution and the output
    projection, whose result goes where `block_output` says. Advances `state`. pending: this layer's draft record, if
    rows may have drafts, else None."""
    n, own = batch.n, space.short_conv
    assert own is not None
    assert batch.states is not None
    stream.short_conv(own.projected, w.conv, state, batch.states, n, own.out, pending)
    add_product(stream, own.out, n, w.output, space)
