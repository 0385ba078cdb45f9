"""The specification of low-rank hyper-connections, in float64: the residual of Qwen3.8-Flash-Next
(https://huggingface.co/docs/transformers/model_doc/qwen4_exp), after hyper-connections
(https://arxiv.org/abs/2409.19606).

For each token the residual has `streams` vectors of `hidden` numbers. A block's input is a gated mean of the normalised
streams. Its output is added to every stream, with a weight per token and stream.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.kernels.norm.reference import norm


class StreamMix(NamedTuple):
    """The weights with which one block reads a residual of several streams, and adds its output to each of them;
    floats."""

    norm: Tensor  # [streams, hidden]
    down: Tensor  # [low_rank, streams * hidden]
    up: Tensor  # [streams * hidden, low_rank]
    inject: Tensor | None = None  # [streams, streams * hidden]; None for the head, which adds nothing


def read(x: Tensor, w: StreamMix, eps: float) -> tuple[Tensor, Tensor | None]:
    """Returns a block's input [n, hidden], and the logits of its output's weights [n, streams] (the product with
    w.inject). x: [n, streams, hidden]. eps: added to the mean square under the norm's root."""
    streams = x.shape[1]
    normed = norm(x, w.norm, eps)
    flat = normed.flatten(1)
    gate = scaled_silu(flat @ w.down.double().T, 1 / streams) @ w.up.double().T
    weights = None if w.inject is None else flat @ w.inject.double().T
    return mix(gate.view_as(normed), normed), weights


def scaled_silu(x: Tensor, factor: float) -> Tensor:
    """Returns silu(factor * x), of x's shape, float64."""
    return torch.nn.functional.silu(x.double() * factor)


def mix(gate: Tensor, normed: Tensor) -> Tensor:
    """Returns the mean over the streams of sigmoid(gate) * normed. gate, normed: [n, streams, hidden]."""
    return (torch.sigmoid(gate.double()) * normed.double()).mean(dim=1)


def inject(x: Tensor, block: Tensor, weights: Tensor) -> Tensor:
    """Returns the residual x [n, streams, hidden] after a block, in float64. block: its output, [n, hidden]; weights:
    the logits from `read`, [n, streams]."""
    scale = 2 * torch.sigmoid(weights.double() / x.shape[1])
    return x.double() + scale[:, :, None] * block.double()[:, None]
