"""The specification of a layer's routed experts.

Gated SiLU: Shazeer 2020, https://arxiv.org/abs/2002.05202; swiglu_oai: gpt-oss, https://arxiv.org/abs/2508.10925;
situ: Kimi-K3, https://arxiv.org/abs/2607.24653;
the limits of silu and the weighting of inputs follow transformers (https://github.com/huggingface/transformers).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from moeserve.kernels.gating import OAI_ALPHA, Activation, limit_of
from moeserve.kernels.linear.reference import linear

Through = Callable[[Tensor], Tensor]


def activate(
    gate: Tensor, up: Tensor, activation: Activation, limit: float | None = None, alpha: float = OAI_ALPHA
) -> Tensor:
    """Returns the input of the down projection, in the shape of `gate` and `up`.

    silu: silu(gate) * up; with a limit: min(silu(gate), limit) * clamp(up, -limit, limit). clamped_silu: the same, but
    silu(min(gate, limit)). relu: relu(gate) * up. gelu: gelu(gate) * up, with GELU's tanh form. swiglu_oai: (up + 1) *
    gate * sigmoid(alpha * gate), with gate at most the limit and up clamped to +-limit. situ: alpha * tanh(gate /
    alpha) * sigmoid(gate) * u, with u = limit * tanh(up / limit), or up if there is no limit. limit: see `limit_of`.
    Raises ValueError for another activation.
    """
    if activation == "relu":
        return gate.relu() * up
    if activation == "gelu":
        return gelu(gate, approximate="tanh") * up
    bound = limit_of(activation, limit) or torch.inf
    if activation == "silu":
        return silu(gate).clamp(max=bound) * up.clamp(-bound, bound)
    if activation == "clamped_silu":
        return silu(gate.clamp(max=bound)) * up.clamp(-bound, bound)
    if activation == "situ":
        bounded = up if bound == torch.inf else bound * torch.tanh(up / bound)
        return alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * bounded
    if activation != "swiglu_oai":
        raise ValueError(
            f"activation: none of silu, clamped_silu, gelu, swiglu_oai, relu, situ but {activation!r}"
        )
    gate, up = gate.clamp(max=bound), up.clamp(-bound, bound)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def experts(
    y: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    into_gate: Through = Tensor.double,
    into_up: Through = Tensor.double,
    into_down: Through = Tensor.double,
    *,
    activation: Activation = "silu",
    limit: float | None = None,
    alpha: float = OAI_ALPHA,
    weighs_input: bool = False,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Returns sum_j weights[t, j] * down(activation(gate(y[t]), up(y[t]))) with expert ids[t, j], in float64: [n,
    hidden].

    y [n, hidden]; gate, up [E, ff, hidden] and down [E, hidden, ff], dequantised: each expert's matrix is [out,
    in]; gate_bias, up_bias [E, ff] and down_bias [E, hidden]: added to the products; ids (negative: none), weights
    [n, top_k]. into_gate, into_up, into_down: applied to the input of that matrix; the identity gives the exact
    result, `quantize.reference.round_trip` what the integer formats compute. weighs_input: a weight multiplies the
    expert's input instead of its output (then without biases of gate and up).
    """
    out = torch.zeros(len(y), down.shape[1], dtype=torch.float64)
    for expert in sorted(set(ids[ids >= 0].tolist())):
        tokens, j = torch.nonzero(ids == expert, as_tuple=True)
        x = y[tokens]
        weight = weights[tokens, j, None].double()
        before, after = (
            (weight, torch.ones_like(weight)) if weighs_input else (torch.ones_like(weight), weight)
        )
        hidden = activate(
            linear(into_gate(x), gate[expert], _of(gate_bias, expert)) * before,
            linear(into_up(x), up[expert], _of(up_bias, expert)) * before,
            activation,
            limit,
            alpha,
        )
        result = linear(into_down(hidden), down[expert], _of(down_bias, expert))
        out.index_add_(0, tokens, after * result)
    return out


def shared_gate(y: Tensor, weight: Tensor | None) -> Tensor:
    """Returns the weight of each token's shared expert (Qwen2-MoE, https://arxiv.org/abs/2407.10671): float64 [n,
    1], sigmoid(y . weight) for y [n, hidden] and weight [hidden]; 1 without a weight."""
    if weight is None:
        return torch.ones(len(y), 1, dtype=torch.float64)
    return torch.sigmoid(y.double() @ weight.double())[:, None]


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
