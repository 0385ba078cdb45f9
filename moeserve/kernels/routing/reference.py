"""The specification of the router's choice (Qwen3: softmax over all experts, top-k, renormalised)."""

from __future__ import annotations

import torch
from torch import Tensor


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The experts of each token, most likely first, of equals the lower id, and their weights, which sum to 1.

    logits [n, experts], finite. Gives ids int32 [n, top_k] and weights float64 [n, top_k].
    """
    ordered, ids = torch.sort(logits.double(), dim=1, descending=True, stable=True)
    # A softmax over all experts and its renormalisation over the chosen is a softmax over the chosen.
    return ids[:, :top_k].int(), ordered[:, :top_k].softmax(dim=1)


def select_streamed_routes(
    ids: Tensor, expert_map: Tensor, local_expert_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The places of routes ids int32 [n, top_k] in expert_map int32 [experts], -1 for ids below 0; and the larger of
    these and `local_expert_ids`."""
    streamed_ids = torch.where(ids >= 0, expert_map[ids.clamp(min=0)], -1)
    return streamed_ids, torch.maximum(local_expert_ids, streamed_ids)
