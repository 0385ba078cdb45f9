"""Copies between the slots of a KV or state cache in RAM and pages of bytes in RAM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.pages.reference import gather_pages, page_bytes, scatter_pages
from moeserve.kernels.stream_operands import KvLayer, StateLayer
from moeserve.kv.host_blocks import HostPage

Slots = npt.NDArray[np.int32]
Wait = Callable[[], None]


class Move(NamedTuple):
    """One page, and the slots that it is copied from or to."""

    slots: Slots
    page: HostPage


def kv_tensors(layers: Iterable[KvLayer]) -> list[Tensor]:
    """Returns the tensors whose rows make up a KV page, in order: the first layer's keys, their scales if it has
    any, its values, their scales, then the next layer's keys."""
    return [tensor for layer in layers for tensor in layer.tensors]


def state_tensors(states: Sequence[StateLayer], layers: Iterable[KvLayer]) -> list[Tensor]:
    """Returns the tensors whose rows make up a sequence's state, in order; none without states."""
    if not states:
        return []
    rings = (layer.of_states for layer in layers)
    return [states[0].states, *(ring for ring in rings if ring is not None)]


class CachePages:
    """Copies slots of the given tensors (their first dimension) to pages and back. A page holds the rows of its
    slots, one tensor after another. A copy may run beside steps that use other slots. Call `out` and `mark` only
    from the thread that executes steps; the other methods may be called from any thread."""

    def __init__(self, tensors: Sequence[Tensor], page_slots: int) -> None:
        # Byte views [slots, bytes per slot]; the empty tensors of layers without attention are left out.
        self._rows = [tensor.flatten(1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        self.page_slots = page_slots
        self.page_bytes = page_bytes(self._rows, page_slots)

    def out(self, moves: Sequence[Move]) -> Wait:
        """Copies slots to pages, with the contents that they have before any work launched later. Returns a function
        that waits until the pages are filled."""
        for slots, page in moves:
            whole = page.buffer()
            gather_pages(self._rows, index_of(slots), whole.view(1, -1))
            page.fill(whole)
        return lambda: None

    def mark(self) -> object:
        """Returns a marker of all work launched so far, for `into` and `reach`."""
        return None

    def reach(self, mark: object) -> None:
        """Waits until all work launched before `mark` has run."""

    def into(self, moves: Sequence[Move], mark: object) -> None:
        """Copies pages to slots after the work launched before `mark`. Returns when the slots are filled."""
        for slots, page in moves:
            scatter_pages(self._rows, index_of(slots), page.joined().view(1, -1))


def index_of(slots: Slots) -> Tensor:
    return torch.from_numpy(slots.astype(np.int64))
