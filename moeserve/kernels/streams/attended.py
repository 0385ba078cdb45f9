"""The specification of attention residuals in float64: the residual of Kimi-K3 (https://arxiv.org/abs/2607.24653).

The residual begins anew every few layers, and its values until then are kept as streams. A block reads a weighted sum
of the kept streams and of the present one, whose weights are a softmax of one product of each normalised stream.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weights(x: Tensor, score: Tensor, eps: float) -> Tensor:
    """Returns the weights of the streams, [n, streams]. x [n, streams, hidden]; score [hidden]: the weight of the
    streams' norm times that of the product. eps: added to the mean square under the norm's root."""
    inverse = torch.rsqrt(x.double().square().mean(dim=-1) + eps)
    return ((x.double() @ score.double()) * inverse).softmax(dim=-1)


def read(x: Tensor, score: Tensor, eps: float) -> Tensor:
    """Returns the weighted sum of the streams, float64 [n, hidden]. Arguments as for `weights`. eps: added to the mean
    square under the norm's root."""
    return (weights(x, score, eps)[..., None] * x.double()).sum(dim=1)
