"""Between a page's bytes and the slots of a KV cache in RAM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.stream_operands import KvLayer


class CachePages:
    """The pages of some layers' KV. A page is the rows of its slots, tensor by tensor: keys of the first layer, their
    scales if they have any, its values, keys of the next. A copy may run beside steps that use other slots."""

    def __init__(self, layers: Sequence[KvLayer], page_tokens: int) -> None:
        every = [tensor for layer in layers for tensor in layer.tensors]
        # As bytes: [slots, bytes of a slot] each; none of a layer that does not attend.
        self._rows = [tensor.flatten(1).view(torch.uint8) for tensor in every if tensor.numel()]
        self.page_tokens = page_tokens
        self.page_bytes = page_tokens * sum(rows.shape[1] for rows in self._rows)

    def gather(self, slots: npt.NDArray[np.int32], page: memoryview) -> None:
        """Copies the slots' KV to `page`, of `page_bytes`."""
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
        sizes = [self.page_tokens * rows.shape[1] for rows in self._rows]
        return [part.view(self.page_tokens, -1) for part in torch.split(whole, sizes)]
