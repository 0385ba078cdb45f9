"""The specification of the embedding, and of the ids that it is given."""

from __future__ import annotations

import torch
from torch import Tensor


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """float32 [n, hidden]: rows ids [n] of the dequantised table [vocab, hidden]."""
    return table[ids.long()].float()


def take_sampled(ids: Tensor, sampled: Tensor) -> Tensor:
    """int32 [n]: ids [n], where -1 - i stands for sampled[i], the nearest one for an i beyond them; 0 for what is no
    token there (below 0)."""
    taken = sampled[(-1 - ids.long()).clamp(0, len(sampled) - 1)].clamp(min=0)
    return torch.where(ids < 0, taken, ids)
