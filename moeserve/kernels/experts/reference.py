"""The specification of a layer's routed experts (gated SiLU: Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from moeserve.kernels.linear.reference import linear

Through = Callable[[Tensor], Tensor]


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
) -> Tensor:
    """sum_j weights[t, j] * down(silu(gate(y[t])) * up(y[t])) with expert ids[t, j], in float64: [n, hidden].

    y [n, hidden]; gate, up [E, ff, hidden] and down [E, hidden, ff], dequantised: each expert's matrix is [out, in];
    ids (below 0: none), weights [n, top_k]. `into_gate` and so on: what happens to the activations on their way into
    that matrix. Nothing gives the truth, `quantize.reference.round_trip` what the integer formats compute.
    """
    out = torch.zeros(len(y), down.shape[1], dtype=torch.float64)
    for expert in sorted(set(ids[ids >= 0].tolist())):
        tokens, j = torch.nonzero(ids == expert, as_tuple=True)
        x = y[tokens]
        hidden = silu(linear(into_gate(x), gate[expert])) * linear(into_up(x), up[expert])
        result = linear(into_down(hidden), down[expert])
        out.index_add_(0, tokens, weights[tokens, j, None].double() * result)
    return out
