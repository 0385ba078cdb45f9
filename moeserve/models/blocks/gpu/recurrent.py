"""Chooses the recurrent mixer that a layer's shape asks for."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.blocks.gpu.delta_net import recur
from moeserve.models.blocks.gpu.mamba2 import recur_mamba2
from moeserve.models.blocks.gpu.short_conv import convolve
from moeserve.models.blocks.gpu.workspace import GpuStateRows, GpuWorkspace
from moeserve.models.loading.gpu_weights import GpuDeltaNet, GpuMamba2, GpuMixer, GpuShortConv
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.recurrence import Recurrence
from moeserve.models.short_conv import ShortConvShape


def mix_recurrent(
    shape: Recurrence,
    w: GpuMixer,
    eps: float,
    state: StateLayer,
    rows: GpuStateRows,
    count: Tensor,
    s: GpuWorkspace,
    records: Tensor | None,
) -> None:
    """Launches the mixer. Reads s.y, the norm of x; writes s.output and advances the sequences' states. records: where
    the layer's drafts record their state changes; None: the engine has no drafts. eps: added to the mean square under
    the norm's root; count: int32 [1] on the device, the number of valid rows."""
    if isinstance(shape, Mamba2Shape):
        assert isinstance(w, GpuMamba2)
        recur_mamba2(shape, w, state, rows, count, s, records)
    elif isinstance(shape, ShortConvShape):
        assert isinstance(w, GpuShortConv)
        convolve(shape, w, state, rows, count, s, records)
    else:
        assert isinstance(w, GpuDeltaNet)
        recur(shape, w, eps, state, rows, count, s, records)
