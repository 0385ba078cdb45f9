"""Between a page's bytes and the slots of a KV cache in RAM; or between a state's bytes and its slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.stream_operands import KvLayer


def kv_tensors(layers: Iterable[KvLayer]) -> list[Tensor]:
    """Of a page of KV: keys of the first layer, their scales if they have any, its values, keys of the next."""
    return [tensor for layer in layers for tensor in layer.tensors]


class CachePages:
    """Pages of some tensors' first dimension. A page is the rows of its slots, tensor by tensor. A copy may run beside
    steps that use other slots."""

    def __init__(self, tensors: Sequence[Tensor], page_slots: int) -> None:
        # As bytes: [slots, bytes of a slot] each; none of a layer that does not attend.
        self._rows = [tensor.flatten(1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        self.page_slots = page_slots
        self.page_bytes = page_slots * sum(rows.shape[1] for rows in self._rows)

    def gather(self, slots: npt.NDArray[np.int32], page: memoryview) -> None:
        """Copies the slots' rows to `page`, of `page_bytes`."""
        index = torch.from_numpy(slots.astype(np.int64))
        for rows, part in zip(self._rows, self._parts(page), strict=True):
            torch.index_select(rows, 0, index, out=part)

    def scatter(self, slots: npt.NDArray[np.int32], page: memoryview) -> None:
        """Copies `page` to the slots."""
        index = torch.from_numpy(slots.astype(np.int64))
        for rows, part in zip(self._rows, self._parts(page), strict=True):
            rows.index_copy_(0, index, part)

    def _parts(self, page: memoryview) -> list[Tensor]:
        whole = torch.frombuffer(page, dtype=torch.uint8)
        sizes = [self.page_slots * rows.shape[1] for rows in self._rows]
        return [part.view(self.page_slots, -1) for part in torch.split(whole, sizes)]
