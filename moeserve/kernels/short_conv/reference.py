"""The specification of LFM2's short convolution (https://huggingface.co/docs/transformers/model_doc/lfm2_moe), in
float64."""

from __future__ import annotations

import torch
from torch import Tensor


def short_conv(rows: Tensor, conv: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes n further tokens of a sequence. rows [n, 3 * channels]: b, c, x; conv [conv_kernel, channels], the
    weight of the oldest token first; state [conv_kernel - 1, channels]: the inputs before these tokens, zeros before
    the first token.

    Returns c * conv(b * x), a causal depthwise convolution, float64 [n, channels], and the state after these tokens."""
    b, c, x = rows.double().chunk(3, dim=-1)
    inputs = torch.cat([state.double(), b * x])
    taps = len(conv)
    out = sum(conv[j].double() * inputs[j : j + len(rows)] for j in range(taps))
    assert isinstance(out, Tensor)
    return c * out, inputs[len(inputs) - (taps - 1) :]
