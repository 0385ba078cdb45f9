"""The specification of the hand-off: the sum that a layer's CPU experts contribute to each row, and which of the missed
experts the GPU fetches instead."""

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


def choose_fetched(
    ids: Tensor, slots: Tensor, places: Tensor, scores: Tensor, share: float, most: int, decay: float
) -> tuple[Tensor, Tensor, list[int]]:
    """Returns a layer's map and scores after the choice, and the experts to fetch, best first.

    ids: int32 [n, top_k], negative: none. slots: int32 [experts], -1: none. places: int32 [experts], -1: the expert is
    neither fetched nor replaced. scores: float32 [experts]. share: of the missed experts, rounded to the nearest
    number; a single one is not fetched. most: the most to fetch.
    """
    used = torch.zeros(len(slots), dtype=torch.bool)
    used[ids[ids >= 0].long()] = True
    scores = scores * decay + used
    missed = (used & (slots < 0) & (places >= 0)).nonzero().flatten().tolist()
    may_go = (~used & (slots >= 0) & (places >= 0)).nonzero().flatten().tolist()
    wanted = int(len(missed) * share + 0.5) if len(missed) > 1 else 0
    come = sorted(missed, key=lambda e: -float(scores[e]))[: min(wanted, most, len(may_go))]
    go = sorted(may_go, key=lambda e: float(scores[e]))[: len(come)]
    slots = slots.clone()
    for incoming, outgoing in zip(come, go, strict=True):
        slots[incoming], slots[outgoing] = slots[outgoing].item(), -1
    return slots, scores, come
