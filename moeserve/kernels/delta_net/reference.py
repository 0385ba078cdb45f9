"""The specification of the gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464) and of Kimi Delta
Attention (Kimi Team 2025, https://arxiv.org/abs/2510.26692), in float64.

The recurrent form, for one sequence, token by token. q, k and v pass a causal depthwise convolution and SiLU first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.kernels.delta_net.heads import DeltaHeads

L2_EPS = 1e-6  # added under the root when q and k are normalised


class DeltaWeights(NamedTuple):
    conv: Tensor  # [conv_kernel, channels], the weight of the oldest token first
    a: Tensor  # [value_heads]: -exp(A_log)
    dt_bias: Tensor  # [decays]
    norm: Tensor  # [value_dim]


class DeltaState(NamedTuple):
    """The recurrent state of one sequence in one layer, after the tokens so far; zeros before the first token."""

    delta: Tensor  # [value_heads, key_dim, value_dim]
    conv: Tensor  # [conv_kernel - 1, channels]: the last inputs, the oldest first

    @staticmethod
    def empty(heads: DeltaHeads) -> DeltaState:
        delta = torch.zeros(heads.value_heads, heads.key_dim, heads.value_dim, dtype=torch.float64)
        return DeltaState(delta, torch.zeros(heads.conv_kernel - 1, heads.channels, dtype=torch.float64))


def delta_net(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    w: DeltaWeights,
    eps: float,
    heads: DeltaHeads,
    state: DeltaState,
) -> tuple[Tensor, DeltaState]:
    """Computes n further tokens of a sequence. qkv [n, channels], z [n, value_width], b [n, value_heads], a [n,
    decays].

    Returns RMSNorm(o) * norm * silu(z) of every value head (sigmoid(z) with `has_sigmoid_gate`), float64 [n,
    value_width], and the state after these tokens. eps: added to the mean square under the norm's root."""
    mixed, conv = causal_conv(qkv.double(), w.conv.double(), state.conv)
    q, k, v = mixed.split([heads.key_width, heads.key_width, heads.value_width], dim=-1)
    of_value_head = torch.tensor([heads.key_head(h) for h in range(heads.value_heads)])
    q = l2_normalize(q.unflatten(-1, (heads.key_heads, heads.key_dim)))[:, of_value_head]
    k = l2_normalize(k.unflatten(-1, (heads.key_heads, heads.key_dim)))[:, of_value_head]
    v = v.unflatten(-1, (heads.value_heads, heads.value_dim))
    gate_input = (a.double() + w.dt_bias.double()).unflatten(-1, (heads.value_heads, -1))
    rate = w.a.double()[:, None]
    if heads.decay_bound:
        decay = (heads.decay_bound * (-rate * gate_input).sigmoid()).exp()
    else:
        decay = (rate * F.softplus(gate_input)).exp()
    o, delta = delta_rule(q * heads.key_dim**-0.5, k, v, decay, b.double().sigmoid(), state.delta)
    normed = o * torch.rsqrt(o.square().mean(dim=-1, keepdim=True) + eps) * w.norm.double()
    gate = F.sigmoid if heads.has_sigmoid_gate else F.silu
    gated = normed * gate(z.double().unflatten(-1, (heads.value_heads, heads.value_dim)))
    return gated.flatten(1), DeltaState(delta, conv)


def causal_conv(
    x: Tensor, weight: Tensor, before: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns silu(bias + sum_j weight[j] * x[t - taps + 1 + j]) for every channel, and the last taps - 1 inputs. x:
    [n, channels]; before: [taps - 1, channels], the inputs before x; bias [channels], None: 0."""
    taps, n = len(weight), len(x)
    seen = torch.cat([before, x])
    start = torch.zeros_like(x) if bias is None else bias
    out = sum((seen[j : j + n] * weight[j] for j in range(taps)), start)
    return F.silu(out), seen[n:]


def l2_normalize(x: Tensor) -> Tensor:
    """Returns x divided by the L2 norm of its last dimension, of x's shape and dtype."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes S = decay * S, then S = S + k (beta * (v - S^T k))^T, o = S^T q, for one token after another.

    q, k [n, heads, key_dim], v [n, heads, value_dim], decay [n, heads, 1 or key_dim], beta [n, heads], state [heads,
    key_dim, value_dim]. Returns o [n, heads, value_dim] and the last state.
    """
    outputs = []
    for t in range(len(q)):
        state = state * decay[t, :, :, None]
        known = torch.einsum("hkv,hk->hv", state, k[t])
        change = (v[t] - known) * beta[t, :, None]
        state = state + k[t, :, :, None] * change[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs), state
