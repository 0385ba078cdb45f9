"""Between pages of KV, or recurrent states, in RAM and the slots of a cache there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.pages.reference import gather_pages, page_bytes, scatter_pages
from moeserve.kernels.stream_operands import KvLayer
from moeserve.kv.host_blocks import HostPage

Slots = npt.NDArray[np.int32]
Wait = Callable[[], None]


class Move(NamedTuple):
    """A page and the slots that it comes from or goes to."""

    slots: Slots
    page: HostPage


def kv_tensors(layers: Iterable[KvLayer]) -> list[Tensor]:
    """The tensors of a page of KV: keys of the first layer, their scales if they have any, its values, keys of the
    next."""
    return [tensor for layer in layers for tensor in layer.tensors]


class CachePages:
    """Pages of some tensors' first dimension. A page is the rows of its slots, tensor by tensor. A copy may run beside
    steps that use other slots. `out` and `mark` are for the thread that executes steps; others are for any."""

    def __init__(self, tensors: Sequence[Tensor], page_slots: int) -> None:
        # As bytes: [slots, bytes of a slot] each; none of a layer that does not attend.
        self._rows = [tensor.flatten(1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        self.page_slots = page_slots
        self.page_bytes = page_bytes(self._rows, page_slots)

    def out(self, moves: Sequence[Move]) -> Wait:
        """Copies slots to pages, as they are before whatever is launched next. Returns what waits until the pages have
        it."""
        for slots, page in moves:
            whole = page.buffer()
            gather_pages(self._rows, index_of(slots), whole.view(1, -1))
            page.fill(whole)
        return lambda: None

    def mark(self) -> object:
        """For `into`: all that was launched so far."""
        return None

    def reach(self, mark: object) -> None:
        """Returns when all that was launched before `mark` has run."""

    def into(self, moves: Sequence[Move], mark: object) -> None:
        """Copies pages to slots, behind what was launched before `mark`; they are there when it returns."""
        for slots, page in moves:
            scatter_pages(self._rows, index_of(slots), page.joined().view(1, -1))


def index_of(slots: Slots) -> Tensor:
    return torch.from_numpy(slots.astype(np.int64))
