"""Column orders of matrices, as tensors; matrices with equal orders share one tensor."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from moeserve.models.sources.gguf import TensorInfo


class SharedOrders:
    """The orders of one model. Matrices that multiply the same input mostly have the same order; the input is then
    gathered once."""

    def __init__(self, device: torch.device | None = None) -> None:
        """device: where the tensors are; None: in RAM."""
        self._device = device or torch.device("cpu")
        self._found: dict[bytes, Tensor] = {}

    def of(self, tensor: TensorInfo) -> Tensor | None:
        """Returns the order of a tensor's columns, int32 [cols] or [E, cols]; None if it has none."""
        if tensor.order is None:
            return None
        key = hashlib.blake2b(tensor.order.tobytes()).digest()
        if key not in self._found:
            self._found[key] = torch.from_numpy(tensor.order.copy()).to(self._device)
        return self._found[key]
