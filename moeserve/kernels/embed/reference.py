"""The specification of the embedding."""

from __future__ import annotations

from torch import Tensor


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """float32 [n, hidden]: rows ids [n] of the dequantised table [vocab, hidden]."""
    return table[ids.long()].float()
