"""Loads the weights of recurrent layers for the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moeserve.kernels.cpu_stream import LinearGroup
from moeserve.kernels.stream_operands import DeltaParameters
from moeserve.models.loading.cpu_weights import CpuDeltaNet, CpuInput, CpuMamba2, CpuShortConv
from moeserve.models.loading.mamba2 import mamba2_parameters
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.recurrence import GatedDeltaNetShape, Recurrence
from moeserve.models.short_conv import ShortConvShape
from moeserve.models.sources.gguf import names as n


def load_recurrence(
    shape: Recurrence,
    norm: CpuInput,
    group: Callable[..., LinearGroup],
    vector: Callable[[str], torch.Tensor],
) -> CpuDeltaNet | CpuMamba2 | CpuShortConv:
    """Loads and returns the weights of a recurrent layer. group: a function that loads the matrices with these part
    names as one group. vector: a function that loads the float32 tensor with this name within the layer. norm: the norm
    or stream mix before the layer."""
    if isinstance(shape, Mamba2Shape):
        return load_mamba2(shape, norm, group, vector)
    if isinstance(shape, ShortConvShape):
        conv = vector(n.of_part(n.SHORT_CONV)).t().contiguous()
        return CpuShortConv(norm, group(n.SHORT_CONV_IN), conv, group(n.SHORT_CONV_OUT))
    return _delta_net(shape, norm, group, vector)


def load_mamba2(
    shape: Mamba2Shape,
    norm: CpuInput,
    group: Callable[..., LinearGroup],
    vector: Callable[[str], torch.Tensor],
) -> CpuMamba2:
    """Loads a Mamba-2 layer: its two matrices in the file's type, its vectors as float32. Arguments as for
    `load_recurrence`."""
    parameters = mamba2_parameters(shape, vector, as_attention=True)
    return CpuMamba2(norm, group(n.SSM_IN), parameters, group(n.SSM_OUT))


def _delta_net(
    shape: GatedDeltaNetShape,
    norm: CpuInput,
    group: Callable[..., LinearGroup],
    vector: Callable[[str], torch.Tensor],
) -> CpuDeltaNet:
    taps = shape.heads.conv_kernel
    conv = torch.cat([vector(n.of_part(part)).view(-1, taps) for part in shape.conv_parts])
    return CpuDeltaNet(
        norm=norm,
        inputs=group(*(part for part, _ in shape.input_parts)),
        gates=[group(part) for part, _ in shape.gate_parts],
        parameters=DeltaParameters(
            conv=conv.t().contiguous(),
            rate=vector(n.SSM_A).view(-1) * (-1 if shape.has_positive_rate else 1),
            dt_bias=vector(n.bias_of_part(n.SSM_DT)),
            norm=vector(n.of_part(n.SSM_NORM)),
        ),
        output=group(shape.output_part),
    )
