"""Input rows of a GPU's first layer that are not token embeddings: x from earlier layers, and embeddings of
pictures."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.planes import Planes
from moeserve.quantization.table import F32


def as_planes(rows: Tensor, device: torch.device) -> Planes:
    """Wraps float rows as planes, in any memory."""
    empty = torch.empty(0, dtype=torch.int32, device=device)
    count, cols = rows.shape
    return Planes(F32, 1, count, cols, rows[None], empty, empty)


def upload(rows: Tensor, into: Tensor) -> None:
    """Launches the copy of `rows` from pageable or pinned RAM to the first rows of `into`, of the same shape and dtype.
    torch keeps the memory until the copy is done."""
    rows = rows.contiguous()
    into.copy_(rows.pin_memory() if into.is_cuda else rows, non_blocking=True)


def numbers(count: int, device: torch.device) -> Tensor:
    """Returns 0 .. count - 1: int32 [count], on the device."""
    return torch.arange(count, dtype=torch.int32, device=device)
