"""The specification of low-rank hyper-connections, in float64: the residual of Qwen3.8-Flash-Next
(https://huggingface.co/docs/transformers/model_doc/qwen4_exp), after hyper-connections
(https://arxiv.org/abs/2409.19606).

A residual has `streams` vectors of `hidden` numbers for each token. A block reads a gated mean of them, all normalised,
and what it gives is added to each stream with a weight of the token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.kernels.norm.reference import norm


class StreamMix(NamedTuple):
    """The weights with which one block reads the residual, and with which its output is added."""

    norm: Tensor  # [streams, hidden]
    down: Tensor  # [low_rank, streams * hidden]
    up: Tensor  # [streams * hidden, low_rank]
    inject: Tensor | None = None  # [streams, streams * hidden]; None: nothing is added, before the head


def read(x: Tensor, w: StreamMix, eps: float) -> tuple[Tensor, Tensor | None]:
    """x [n, streams, hidden]. Returns a block's input [n, hidden], and the products of inject [n, streams]."""
    streams = x.shape[1]
    normed = norm(x, w.norm, eps)
    flat = normed.flatten(1)
    gate = scaled_silu(flat @ w.down.double().T, 1 / streams) @ w.up.double().T
    weights = None if w.inject is None else flat @ w.inject.double().T
    return mix(gate.view_as(normed), normed), weights


def scaled_silu(x: Tensor, factor: float) -> Tensor:
    return torch.nn.functional.silu(x.double() * factor)


def mix(gate: Tensor, normed: Tensor) -> Tensor:
    """The mean over the streams of sigmoid(gate) * normed. gate, normed [n, streams, hidden]."""
    return (torch.sigmoid(gate.double()) * normed.double()).mean(dim=1)


def inject(x: Tensor, block: Tensor, weights: Tensor) -> Tensor:
    """The residual [n, streams, hidden] behind a block. block: what it gives, [n, hidden]; weights: [n, streams]."""
    scale = 2 * torch.sigmoid(weights.double() / x.shape[1])
    return x.double() + scale[:, :, None] * block.double()[:, None]
