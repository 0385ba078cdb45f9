"""Divides memory that other GPUs write to into inboxes, at the same offsets on every GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes


class Inbox(NamedTuple):
    here: Tensor  # this GPU's, initially zero
    peers: Tensor  # int64 [ranks]: addresses of all GPUs' inboxes


class Inboxes:
    """Allocates inboxes one after another. Every rank must ask for the same ones."""

    def __init__(self, region: Tensor, addresses: Sequence[int]) -> None:
        """region: uint8, zeros, writable by all ranks; addresses: of all ranks' regions."""
        self._region = region
        self._addresses = addresses
        self._used = 0

    def take(self, numbers: int, dtype: torch.dtype) -> Inbox:
        """Returns a flat inbox. Raises ValueError if the region is full."""
        start, nbytes = self._used, numbers * dtype.itemsize
        if start + nbytes > len(self._region):
            raise ValueError(
                f"{nbytes} bytes at offset {start} do not fit in a region of {len(self._region)} bytes"
            )
        self._used += padded(nbytes)
        peers = [address + start for address in self._addresses]
        here = self._region[start : start + nbytes].view(dtype)
        return Inbox(here, torch.tensor(peers, dtype=torch.int64, device=here.device))


def padded(nbytes: int) -> int:
    """Returns the bytes of the region that an inbox of `nbytes` bytes takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
