"""The specification of n-gram embeddings, in float64: those of Qwen3.8-Flash-Next
(https://huggingface.co/docs/transformers/model_doc/qwen4_exp).

A token's embeddings are rows of a table, chosen by hashes of the token and those before it (`hashing.py`). Each stream
of the residual lets a value made of them in as far as a key made of them agrees with the stream; a causal convolution
adds what the tokens before let in.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.kernels.norm.reference import norm

LEAST_AGREEMENT = 1e-6  # under the root


class NgramWeights(NamedTuple):
    key: Tensor  # [streams * hidden, width]
    value: Tensor  # [hidden, width]
    query_norm: Tensor  # [streams, hidden], of the residual
    key_norm: Tensor
    conv_norm: Tensor  # of what the convolution reads
    conv: Tensor  # [taps, streams * hidden], the weight of the oldest token first


def gate(x: Tensor, key: Tensor, value: Tensor, w: NgramWeights, eps: float) -> tuple[Tensor, Tensor]:
    """x, key [n, streams, hidden]; value [n, hidden]. Returns how far each stream lets the value in, [n, streams], and
    what the convolution reads of it, [n, streams, hidden]."""
    agreement = (norm(key, w.key_norm, eps) * norm(x, w.query_norm, eps)).sum(-1) / math.sqrt(x.shape[-1])
    root = agreement.abs().clamp_min(LEAST_AGREEMENT).sqrt() * agreement.sign()
    factors = torch.sigmoid(root)
    return factors, norm(factors[:, :, None] * value.double()[:, None], w.conv_norm, eps)


def convolve(inputs: Tensor, conv: Tensor, dilation: int, before: Tensor) -> tuple[Tensor, Tensor]:
    """silu(sum over j of conv[j] * inputs[t - (taps - 1 - j) * dilation]), and the last (taps - 1) * dilation inputs.
    inputs: [n, channels]; before: the inputs ahead of them, [(taps - 1) * dilation, channels], the oldest first."""
    seen, n = torch.cat([before.double(), inputs.double()]), len(inputs)
    taps = (seen[j * dilation : j * dilation + n] * conv[j].double() for j in range(len(conv)))
    return F.silu(torch.stack(list(taps)).sum(0)), seen[n:]


def add(
    x: Tensor, embedded: Tensor, w: NgramWeights, eps: float, dilation: int, before: Tensor
) -> tuple[Tensor, Tensor]:
    """n further tokens of a sequence: the residual with its n-gram embeddings, [n, streams, hidden], and the
    convolution's state behind them. embedded: [n, width]."""
    key, value = embedded.double() @ w.key.double().T, embedded.double() @ w.value.double().T
    factors, inputs = gate(x, key.view_as(x), value, w, eps)
    mixed, after = convolve(inputs.flatten(1), w.conv, dilation, before)
    return x.double() + factors[:, :, None] * value[:, None] + mixed.view(x.shape), after
