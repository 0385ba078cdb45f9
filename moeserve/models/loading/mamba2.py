"""The parameters of Mamba-2 layers as the kernels read them, from a file's tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moeserve.kernels.stream_operands import Mamba2Parameters
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.sources.gguf import names as n


def mamba2_parameters(
    shape: Mamba2Shape, vector: Callable[[str], torch.Tensor], *, as_attention: bool = False
) -> Mamba2Parameters:
    """Returns a layer's parameters. vector: a function that returns the float32 tensor with a name within the layer.
    as_attention: whether to order the convolution's channels C, B, x, which correspond to q, k, v; otherwise they stay
    x, B, C, as in the file."""
    heads = shape.heads
    conv = vector(n.of_part(n.SSM_CONV1D)).view(heads.channels, heads.conv_kernel)
    conv_bias = vector(n.bias_of_part(n.SSM_CONV1D))
    if as_attention:
        x, b, c = torch.arange(heads.channels).split([heads.value_width, heads.key_width, heads.key_width])
        order = torch.cat([c, b, x])
        conv, conv_bias = conv[order], conv_bias[order]
    return Mamba2Parameters(
        conv=conv.t().contiguous(),
        conv_bias=conv_bias.contiguous(),
        rate=vector(n.SSM_A).view(-1),
        dt_bias=vector(n.bias_of_part(n.SSM_DT)),
        skip=vector(n.SSM_D).view(-1),
        norm=vector(n.of_part(n.SSM_NORM)).view(-1) if shape.has_norm else None,
    )
