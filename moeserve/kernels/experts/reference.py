"""The specification of a layer's routed experts (gated SiLU: Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from moeserve.kernels.linear.reference import linear


def experts(
    y: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    into_up: Callable[[Tensor], Tensor] = Tensor.double,
    into_down: Callable[[Tensor], Tensor] = Tensor.double,
) -> Tensor:
    """sum_j weights[t, j] * down(silu(gate(y[t])) * up(y[t])) with expert ids[t, j], in float64: [n, hidden].

    y [n, hidden]; gate, up [E, ff, hidden] and down [E, hidden, ff], dequantised: each expert's matrix is [out, in];
    ids, weights [n, top_k]. `into_up`, `into_down`: what happens to the activations on their way into gate and up, and
    into down: nothing gives the truth, `quantize.reference.round_trip` what integer formats do.
    """
    y = into_up(y)
    out = torch.zeros(len(y), down.shape[1], dtype=torch.float64)
    for expert in ids.unique().tolist():
        tokens, j = torch.nonzero(ids == expert, as_tuple=True)
        hidden = silu(linear(y[tokens], gate[expert])) * linear(y[tokens], up[expert])
        result = linear(into_down(hidden), down[expert])
        out.index_add_(0, tokens, weights[tokens, j, None].double() * result)
    return out
