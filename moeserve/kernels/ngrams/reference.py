"""The specification of Qwen3.8-Flash-Next's n-gram embeddings, in float64
(https://huggingface.co/docs/transformers/model_doc/qwen4_exp).

A token's n-gram embeddings are rows of a table, chosen by hashes of the token and the tokens before it (`hashing.py`).
A value and a key per stream are computed from them. Each stream of the residual adds the value times a gate: the
similarity of the stream and the key. A causal convolution over the gated values of earlier tokens is added, too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.kernels.norm.reference import norm

LEAST_AGREEMENT = 1e-6  # least value under the root


class NgramWeights(NamedTuple):
    key: Tensor  # [streams * hidden, width]
    value: Tensor  # [hidden, width]
    query_norm: Tensor  # [streams, hidden], for the residual
    key_norm: Tensor
    conv_norm: Tensor  # for the convolution's input
    conv: Tensor  # [taps, streams * hidden], the weight of the oldest token first


def gate(x: Tensor, key: Tensor, value: Tensor, w: NgramWeights, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the gate of each stream for the value, [n, streams], and the convolution's input, [n, streams, hidden].
    x, key: [n, streams, hidden]; value: [n, hidden]. eps: added to the mean square under the norm's root."""
    agreement = (norm(key, w.key_norm, eps) * norm(x, w.query_norm, eps)).sum(-1) / math.sqrt(x.shape[-1])
    root = agreement.abs().clamp_min(LEAST_AGREEMENT).sqrt() * agreement.sign()
    factors = torch.sigmoid(root)
    return factors, norm(factors[:, :, None] * value.double()[:, None], w.conv_norm, eps)


def convolve(inputs: Tensor, conv: Tensor, dilation: int, before: Tensor) -> tuple[Tensor, Tensor]:
    """Returns silu(sum over j of conv[j] * inputs[t - (taps - 1 - j) * dilation]), and the last (taps - 1) * dilation
    inputs. inputs: [n, channels]; before: the inputs of earlier tokens, [(taps - 1) * dilation, channels], the oldest
    first."""
    seen, n = torch.cat([before.double(), inputs.double()]), len(inputs)
    taps = (seen[j * dilation : j * dilation + n] * conv[j].double() for j in range(len(conv)))
    return F.silu(torch.stack(list(taps)).sum(0)), seen[n:]


def add(
    x: Tensor, embedded: Tensor, w: NgramWeights, eps: float, dilation: int, before: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes n further tokens of a sequence. Returns the residual plus its n-gram embeddings, [n, streams, hidden],
    and the convolution's state after these tokens. embedded: [n, width]. eps: added to the mean square under the
    norm's root."""
    key, value = embedded.double() @ w.key.double().T, embedded.double() @ w.value.double().T
    factors, inputs = gate(x, key.view_as(x), value, w, eps)
    mixed, after = convolve(inputs.flatten(1), w.conv, dilation, before)
    return x.double() + factors[:, :, None] * value[:, None] + mixed.view(x.shape), after
