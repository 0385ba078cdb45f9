"""The specification of the hand-off: the sum that a layer's CPU experts contribute to each row."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.experts.reference import experts


def handoff(
    x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """Returns float64 [n, hidden]: the weighted sum over each row's CPU experts; zeros for a row without any.

    ids int32 [n, top_k], negative: none; weights [n, top_k]; expert_map int32 [experts]: an expert's index on the
    CPU, -1: not there. gate, up, down: of the CPU's experts, dequantised [E, out, in].
    """
    local = torch.where(ids >= 0, expert_map[ids.clamp(min=0)], -1)
    return experts(x, gate, up, down, local, weights)
