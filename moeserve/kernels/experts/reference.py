"""The specification of a layer's experts: routed, and shared by all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from moeserve.kernels.linear.reference import linear

Through = Callable[[Tensor], Tensor]


def gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """What the down projection takes of the products with gate and up. "silu": silu(gate) * up (Shazeer 2020,
    https://arxiv.org/abs/2002.05202). "swiglu_oai": gpt-oss's (https://arxiv.org/abs/2508.10925)."""
    if activation == "silu":
        return silu(gate) * up
    assert activation == "swiglu_oai"
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1.0) * gate * torch.sigmoid(1.702 * gate)


def shared_gate(x: Tensor, weight: Tensor) -> Tensor:
    """float64 [n]: what a shared expert's output is multiplied with (Qwen2-MoE: https://arxiv.org/abs/2407.10671). x
    [n, hidden], weight [hidden]."""
    return torch.sigmoid(x.double() @ weight.double())


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
    activation: str = "silu",
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """sum_j weights[t, j] * down(gated(gate(y[t]), up(y[t]))) with expert ids[t, j], in float64: [n, hidden].

    y [n, hidden]; gate, up [E, ff, hidden] and down [E, hidden, ff], dequantised: each expert's matrix is [out, in];
    ids (below 0: none), weights [n, top_k]. `into_gate` and so on: what happens to the activations on their way into
    that matrix. Nothing gives the truth, `quantize.reference.round_trip` what the integer formats compute. biases:
    added to the products of gate and up [E, ff] and of down [E, hidden].
    """
    out = torch.zeros(len(y), down.shape[1], dtype=torch.float64)
    for expert in sorted(set(ids[ids >= 0].tolist())):
        tokens, j = torch.nonzero(ids == expert, as_tuple=True)
        x = y[tokens]
        of_gate, of_up = linear(into_gate(x), gate[expert]), linear(into_up(x), up[expert])
        if biases is not None:
            of_gate, of_up = of_gate + biases[0][expert], of_up + biases[1][expert]
        result = linear(into_down(gated(of_gate, of_up, activation)), down[expert])
        if biases is not None:
            result = result + biases[2][expert]
        out.index_add_(0, tokens, weights[tokens, j, None].double() * result)
    return out
