"""Loads the weights of recurrent layers to a GPU.

Arguments of all functions: `linear` loads the layer's matrices of these parts, over the same input; `vector` takes a
name within the layer and loads the float32 tensor; `norm` computes the layer's input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.models.loading.gpu_inputs import GpuInput
from moeserve.models.loading.gpu_weights import GpuDeltaNet, GpuMamba2, GpuShortConv
from moeserve.models.loading.mamba2 import mamba2_parameters
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.recurrence import GatedDeltaNetShape, Recurrence
from moeserve.models.short_conv import ShortConvShape
from moeserve.models.sources.gguf import names as n

Linear = Callable[..., list[MergedLinear]]
Vector = Callable[[str], Tensor]


def load_recurrence(
    shape: Recurrence, norm: GpuInput, linear: Linear, vector: Vector
) -> GpuDeltaNet | GpuMamba2 | GpuShortConv:
    """Loads a recurrent layer of any kind."""
    if isinstance(shape, Mamba2Shape):
        return load_mamba2(shape, norm, linear, vector)
    if isinstance(shape, ShortConvShape):
        return _short_conv(norm, linear, vector)
    return _delta_net(shape, norm, linear, vector)


def load_mamba2(shape: Mamba2Shape, norm: GpuInput, linear: Linear, vector: Vector) -> GpuMamba2:
    """Loads a Mamba-2 layer."""
    (into,), (output,) = linear(n.SSM_IN), linear(n.SSM_OUT)
    return GpuMamba2(norm, into, mamba2_parameters(shape, vector), output)


def _delta_net(shape: GatedDeltaNetShape, norm: GpuInput, linear: Linear, vector: Vector) -> GpuDeltaNet:
    taps = shape.heads.conv_kernel
    conv = torch.cat([vector(n.of_part(part)).view(-1, taps) for part in shape.conv_parts])
    return GpuDeltaNet(
        norm=norm,
        inputs=linear(*(part for part, _ in shape.input_parts)),
        gates=[linear(part)[0] for part, _ in shape.gate_parts],
        conv=conv.t().contiguous(),
        rate=vector(n.SSM_A).view(-1) * (-1 if shape.has_positive_rate else 1),
        dt_bias=vector(n.bias_of_part(n.SSM_DT)),
        output_norm=vector(n.of_part(n.SSM_NORM)),
        output=linear(shape.output_part)[0],
    )


def _short_conv(norm: GpuInput, linear: Linear, vector: Vector) -> GpuShortConv:
    return GpuShortConv(
        norm=norm,
        input=linear(n.SHORT_CONV_IN)[0],
        conv=vector(n.of_part(n.SHORT_CONV)).t().contiguous(),
        output=linear(n.SHORT_CONV_OUT)[0],
    )
