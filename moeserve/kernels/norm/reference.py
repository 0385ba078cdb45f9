"""The specification of RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467), and of LayerNorm without
a bias (Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450)."""

from __future__ import annotations

import torch
from torch import Tensor


def norm(
    x: Tensor, weight: Tensor | None, eps: float, rows: Tensor | None = None, *, centered: bool = False
) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float64; with `centered`, LayerNorm: of
    x - mean(x). weight None: x itself.

    x [n, cols], weight [cols]; rows: indices [m] of the rows to take, all by default. Returns [m, cols].
    """
    chosen = (x if rows is None else x[rows.long()]).double()
    if weight is None:
        return chosen
    if centered:
        chosen = chosen - chosen.mean(dim=-1, keepdim=True)
    return chosen * torch.rsqrt(chosen.square().mean(dim=-1, keepdim=True) + eps) * weight.double()


def sandwich_sum(
    x: Tensor,
    dense: Tensor,
    experts: Tensor,
    dense_norm: Tensor,
    experts_norm: Tensor,
    output_norm: Tensor,
    factor: Tensor,
    eps: float,
) -> Tensor:
    """Returns the residual stream after a sandwiched layer (Gemma 4): (x + norm(norm(dense) + norm(experts))) *
    factor, in float64. x, dense, experts [n, cols]; the norms' weights [cols]; factor [1]. eps: added to the mean
    square under the norm's root."""
    parts = norm(dense, dense_norm, eps) + norm(experts, experts_norm, eps)
    return (x.double() + norm(parts, output_norm, eps)) * factor.double()
