"""The specification of hyper-connections whose streams are mixed by a doubly stochastic matrix, in float64: the
residual of DeepSeek-V4 (https://huggingface.co/docs/transformers/model_doc/deepseek_v4).

A block reads a weighted sum of the streams. Behind it the streams are mixed, and its output is added to each with a
weight. All weights are functions of the normalised residual. The mix is made doubly stochastic by Sinkhorn's iteration.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SinkhornMix(NamedTuple):
    """The parameters of one block's connection to a residual of several streams, which are mixed by a doubly stochastic
    matrix (Sinkhorn's iteration). They apply after the product with the normalised residual."""

    base: Tensor  # [streams * (2 + streams)]: of what is read, of what is added, of the mix; [streams] before the head
    scale: Tensor  # [3]; [1] before the head
    eps: float
    iterations: int


def read(products: Tensor, x: Tensor, w: SinkhornMix) -> Tensor:
    """Returns the weighted sum of the streams, [n, hidden]. products [n, at least streams]; x [n, streams, hidden]."""
    streams = x.shape[1]
    before = torch.sigmoid(products[:, :streams].double() * w.scale[0].double() + w.base[:streams].double())
    return ((before + w.eps)[..., None] * x.double()).sum(dim=1)


def weights(products: Tensor, streams: int, w: SinkhornMix) -> tuple[Tensor, Tensor]:
    """Returns the weights of a block's output [n, streams], and the mix [n, from, to]."""
    _, added, mix = products.double().split([streams, streams, streams**2], dim=1)
    _, added_base, mix_base = w.base.double().split([streams, streams, streams**2])
    mix = (mix * w.scale[2] + mix_base).unflatten(1, (streams, streams)).softmax(dim=-1) + w.eps
    for index in range(w.iterations):
        if index:
            mix = mix / (mix.sum(dim=-1, keepdim=True) + w.eps)
        mix = mix / (mix.sum(dim=-2, keepdim=True) + w.eps)
    return 2 * torch.sigmoid(added * w.scale[1] + added_base), mix


def add(x: Tensor, block: Tensor, added: Tensor, mix: Tensor) -> Tensor:
    """Returns the residual [n, streams, hidden] after a block whose output is [n, hidden]."""
    return torch.einsum("njs,njh->nsh", mix.double(), x.double()) + added[..., None] * block.double()[:, None]
