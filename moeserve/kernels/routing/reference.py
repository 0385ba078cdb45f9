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
