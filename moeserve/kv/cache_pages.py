"""Copies between the slots of a KV or state cache in RAM and pages of bytes in RAM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Returns the tensors whose rows make up a KV page, in order: the first layer's keys, their scales if it has any,
    its values, their scales, then the next layer's keys. Each tensor is [slots, ...], in the KV cache's dtype."""
    return [tensor for layer in layers for tensor in layer.tensors]


def state_tensors(states: Sequence[StateLayer], layers: Iterable[KvLayer]) -> list[Tensor]:
    """Returns the tensors whose rows make up a sequence's recurrent state, [state slots, ...] each, in the order in
    which they are stored; an empty list without states."""
    if not states:
        return []
    rings = (layer.of_states for layer in layers)
    return [states[0].states, *(ring for ring in rings if ring is not None)]


def kv_blocks(layers: Iterable[KvLayer]) -> list[int]:
    """Returns of each of `kv_tensors` the tokens for which it has one row."""
    return [layer.block for layer in layers for _ in layer.tensors]


class CachePages:
    """Copies slots of the given tensors (their first dimension) to pages and back. A page holds the rows of its
    slots, one tensor after another. A copy may run beside steps that use other slots. Call `out` and `mark` only
    from the thread that executes steps; the other methods may be called from any thread."""

    def __init__(self, tensors: Sequence[Tensor], page_slots: int, blocks: Sequence[int] = ()) -> None:
        """blocks: of each tensor, the tokens for which it has one row; empty: it has a row for each slot."""
        # Byte views [slots, bytes per slot]; the empty tensors of layers without attention are left out.
        every = zip(tensors, blocks or [1] * len(tensors), strict=True)
        views = [(t.flatten(1).view(torch.uint8), block) for t, block in every if t.numel()]
        self._rows = [view for view, block in views if block == 1]
        self._entries = [(view, -(-page_slots // block)) for view, block in views if block > 1]
        self.page_slots = page_slots
        self._entries_at = page_bytes(self._rows, page_slots)
        self.page_bytes = self._entries_at + sum(view.shape[1] * most for view, most in self._entries)

    def out(self, moves: Sequence[Move]) -> Wait:
        """Copies slots to pages, with the contents that they have before any work launched later. Returns a function
        that waits until the pages are filled."""
        for slots, page in moves:
            whole = page.buffer()
            gather_pages(self._rows, index_of(slots), whole[: self._entries_at].view(1, -1))
            for view, index, part in self._parts_of_entries(slots, whole):
                part.zero_()
                torch.index_select(view, 0, index, out=part[: len(index)])
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
            whole = page.joined()
            scatter_pages(self._rows, index_of(slots), whole[: self._entries_at].view(1, -1))
            for view, index, part in self._parts_of_entries(slots, whole):
                view.index_copy_(0, index, part[: len(index)])

    def _parts_of_entries(self, slots: Slots, page: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields (tensor, the page's slots that have rows in it, the part of the page for their rows)."""
        at = self._entries_at
        for view, most in self._entries:
            size = most * view.shape[1]
            yield view, index_of(slots[slots < len(view)]), page[at : at + size].view(most, -1)
            at += size


def index_of(slots: Slots) -> Tensor:
    """Returns the slots as an index: int64 [len(slots)], in RAM."""
    return torch.from_numpy(slots.astype(np.int64))
