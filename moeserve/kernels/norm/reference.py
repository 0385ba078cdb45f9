"""The specification of RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float, rows: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float64.

    x [n, cols], weight [cols]; rows: indices [m] of the rows to take, all of them without it. Gives [m, cols].
    """
    chosen = (x if rows is None else x[rows.long()]).double()
    return chosen * torch.rsqrt(chosen.square().mean(dim=-1, keepdim=True) + eps) * weight.double()
