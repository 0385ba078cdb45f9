"""The specification of the embedding, and of the replacement of placeholder ids."""

from __future__ import annotations

import torch
from torch import Tensor


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """float32 [n, hidden]: rows ids [n] of the dequantised table [vocab, hidden]."""
    return table[ids.long()].float()


def take_sampled(ids: Tensor, sampled: Tensor) -> Tensor:
    """Returns int32 [n]: ids, with -1 - i replaced by sampled[i] (the nearest one if out of range), or 0 if that is
    negative."""
    taken = sampled[(-1 - ids.long()).clamp(0, len(sampled) - 1)].clamp(min=0)
    return torch.where(ids < 0, taken, ids)
