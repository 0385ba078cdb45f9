"""Calls the recurrent mixer that a layer's shape asks for."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.blocks.cpu.delta_net import project_delta, recur
from moeserve.models.blocks.cpu.mamba2 import project_mamba2, recur_mamba2
from moeserve.models.blocks.cpu.short_conv import convolve, project_short_conv
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.loading.cpu_weights import CpuDeltaNet, CpuMamba2, CpuMixer, CpuShortConv
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.recurrence import Recurrence
from moeserve.models.short_conv import ShortConvShape


def project_recurrent(
    stream: CpuStream, shape: Recurrence, w: CpuMixer, eps: float, n: int, space: CpuWorkspace
) -> None:
    """Launches the mixer's products of norm(x), before tokens interact. eps: added to the mean square under the norm's
    root; n: rows of the step."""
    if isinstance(shape, Mamba2Shape):
        assert isinstance(w, CpuMamba2)
        project_mamba2(stream, w, eps, n, space)
    elif isinstance(shape, ShortConvShape):
        assert isinstance(w, CpuShortConv)
        project_short_conv(stream, w, eps, n, space)
    else:
        assert isinstance(w, CpuDeltaNet)
        project_delta(stream, w, eps, n, space)


def mix_recurrent(
    stream: CpuStream,
    shape: Recurrence,
    w: CpuMixer,
    eps: float,
    state: StateLayer,
    batch: CpuBatch,
    space: CpuWorkspace,
    pending: Tensor | None,
) -> None:
    """Launches the rest of a recurrent mixer (gated delta net, Mamba-2, short convolution) after `project_recurrent`,
    and advances its states. pending: this layer's draft record, if rows may have drafts, else None; eps: added to the
    mean square under the norm's root."""
    if isinstance(shape, Mamba2Shape):
        assert isinstance(w, CpuMamba2)
        recur_mamba2(stream, w, shape, state, batch, space, pending)
    elif isinstance(shape, ShortConvShape):
        assert isinstance(w, CpuShortConv)
        convolve(stream, w, state, batch, space, pending)
    else:
        assert isinstance(w, CpuDeltaNet)
        recur(stream, w, shape, eps, state, batch, space, pending)
