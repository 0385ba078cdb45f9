"""The specification of the embedding, of the replacement of placeholder ids, and of DeepStack's additions."""

from __future__ import annotations

import torch
from torch import Tensor

EMBEDDED = -(1 << 31)  # the id of a row whose input is an embedding instead of a token's


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """Returns float32 [n, hidden]: rows ids [n] of the dequantised table [vocab, hidden]."""
    return table[ids.long()].float()


def take_sampled(ids: Tensor, sampled: Tensor) -> Tensor:
    """Returns int32 [n]: ids, with -1 - i replaced by sampled[i] (the nearest one if out of range), or 0 if that is
    negative. EMBEDDED stays."""
    taken = sampled[(-1 - ids.long()).clamp(0, len(sampled) - 1)].clamp(min=0)
    return torch.where((ids < 0) & (ids != EMBEDDED), taken, ids)


def add_deep(ids: Tensor, deep: Tensor, x: Tensor) -> Tensor:
    """Returns float32 [n, hidden]: x, plus deep [n, hidden] in rows with the id EMBEDDED (DeepStack,
    https://arxiv.org/abs/2406.04334)."""
    return torch.where((ids == EMBEDDED)[:, None], x + deep, x)
