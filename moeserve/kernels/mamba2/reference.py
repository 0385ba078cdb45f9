"""The specification of Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060), in float64.

For one sequence and token by token: the recurrent form. The chunked form of the paper (state space duality) computes
the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.kernels.delta_net.reference import causal_conv
from moeserve.kernels.mamba2.heads import Mamba2Heads


class Mamba2Weights(NamedTuple):
    conv: Tensor  # [conv_kernel, channels] of x, B and C, the weight of the oldest token first
    conv_bias: Tensor  # [channels]
    a: Tensor  # [num_heads]: -exp(A_log)
    dt_bias: Tensor  # [num_heads]
    d: Tensor  # [num_heads]
    norm: Tensor | None  # [value_width]; None: the gated output is not normalised


class Mamba2State(NamedTuple):
    """The recurrent state of one sequence in one layer, after the tokens so far; zeros before the first token."""

    heads: Tensor  # [num_heads, state_dim, head_dim]
    conv: Tensor  # [conv_kernel - 1, channels]: the last inputs, the oldest first

    @staticmethod
    def empty(heads: Mamba2Heads) -> Mamba2State:
        of_heads = torch.zeros(heads.num_heads, heads.state_dim, heads.head_dim, dtype=torch.float64)
        return Mamba2State(of_heads, torch.zeros(heads.conv_kernel - 1, heads.channels, dtype=torch.float64))


def mamba2(
    rows: Tensor, w: Mamba2Weights, eps: float, heads: Mamba2Heads, state: Mamba2State
) -> tuple[Tensor, Mamba2State]:
    """Computes n further tokens of a sequence. rows: [n, row_width].

    With dt = softplus(dt + dt_bias): S = exp(dt * a) * S + B (dt * x)^T, y = S^T C + d * x, for each head. Returns
    RMSNorm(y * silu(z)) * norm, normalised over the heads of a group (y * silu(z) without a norm), float64 [n,
    value_width], and the state after these tokens. eps: added to the mean square under the norm's root."""
    h = heads
    z, channels, dt = rows.double().split([h.value_width, h.channels, h.num_heads], dim=-1)
    mixed, conv = causal_conv(channels, w.conv.double(), state.conv, w.conv_bias.double())
    x, b, c = mixed.split([h.value_width, h.key_width, h.key_width], dim=-1)
    x = x.unflatten(-1, (h.num_heads, h.head_dim))
    per_group = h.num_heads // h.num_groups
    b, c = (part.unflatten(-1, (h.num_groups, -1)).repeat_interleave(per_group, dim=1) for part in (b, c))
    dt = F.softplus(dt + w.dt_bias.double())
    of_heads, outputs = state.heads, []
    for t in range(len(rows)):
        decay = (dt[t] * w.a.double()).exp()[:, None, None]
        of_heads = decay * of_heads + b[t, :, :, None] * (dt[t, :, None] * x[t])[:, None, :]
        outputs.append(torch.einsum("hnp,hn->hp", of_heads, c[t]) + w.d.double()[:, None] * x[t])
    gated = torch.stack(outputs).flatten(1) * F.silu(z)
    if w.norm is None:
        return gated, Mamba2State(of_heads, conv)
    grouped = gated.unflatten(-1, (h.num_groups, h.group_width))
    normed = grouped * torch.rsqrt(grouped.square().mean(dim=-1, keepdim=True) + eps)
    return normed.flatten(1) * w.norm.double(), Mamba2State(of_heads, conv)
