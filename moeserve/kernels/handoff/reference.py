"""The specification of the hand-off: what a layer's CPU experts add to each row."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.experts.reference import experts


def split(ids: Tensor, weights: Tensor, expert_map: Tensor, max_deferred: int = 0) -> tuple[Tensor, Tensor]:
    """Which of the chosen experts the CPU computes at once and which one layer later, by their places there.

    ids int32 [n, top_k], below 0: none; weights [n, top_k]; expert_map int32 [experts], -1: not on the CPU. Gives two
    int32 [n, top_k], -1 where there is none. Late are those of the `max_deferred` least weights of all (of equals the
    later column) that are on the CPU.
    """
    local = torch.where(ids >= 0, expert_map[ids.clamp(min=0)], -1)
    rank = torch.argsort(torch.argsort(weights, dim=1, descending=True, stable=True), dim=1)
    late = rank >= ids.shape[1] - max_deferred
    return torch.where(late, -1, local), torch.where(late, local, -1)


def handoff(
    x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """float64 [n, hidden]: the sum over each row's CPU experts, weighed; zeros without any. gate, up, down: only those
    experts, dequantised [E, out, in]."""
    local, _ = split(ids, weights, expert_map)
    return experts(x, gate, up, down, local, weights)
