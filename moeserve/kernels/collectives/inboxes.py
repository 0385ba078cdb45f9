"""Memory that other GPUs write to, cut into inboxes: alike on every GPU, so that an inbox' place in one's memory is its
place in all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes


class Inbox(NamedTuple):
    here: Tensor  # this GPU's, of zeros
    peers: Tensor  # int64 [ranks]: the addresses of all GPUs'


class Inboxes:
    """Hands one out after another. Every rank asks for the same ones."""

    def __init__(self, region: Tensor, addresses: Sequence[int]) -> None:
        """region: uint8, zeros, which all ranks can write to; addresses: of all ranks'."""
        self._region = region
        self._addresses = addresses
        self._used = 0

    def take(self, numbers: int, dtype: torch.dtype) -> Inbox:
        """Flat. ValueError where the region is full."""
        start, nbytes = self._used, numbers * dtype.itemsize
        if start + nbytes > len(self._region):
            raise ValueError(f"{nbytes} bytes behind {start} of a region of {len(self._region)}")
        self._used += padded(nbytes)
        peers = [address + start for address in self._addresses]
        here = self._region[start : start + nbytes].view(dtype)
        return Inbox(here, torch.tensor(peers, dtype=torch.int64, device=here.device))


def padded(nbytes: int) -> int:
    """Bytes of its region that an inbox of `nbytes` bytes takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
