"""The orders of matrices' columns, as tensors: equal ones are one tensor."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from moeserve.models.sources.gguf import TensorInfo


class SharedOrders:
    """The orders of one model. Matrices over one input mostly have one order, whose input is then gathered once."""

    def __init__(self) -> None:
        self._found: dict[bytes, Tensor] = {}

    def of(self, tensor: TensorInfo) -> Tensor | None:
        """Returns the order of a tensor's columns, int32 [cols] or [E, cols]; None if it has none."""
        if tensor.order is None:
            return None
        key = hashlib.blake2b(tensor.order.tobytes()).digest()
        return self._found.setdefault(key, torch.from_numpy(tensor.order.copy()))
