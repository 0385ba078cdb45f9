"""The CPU pool's panels of experts as memory that a GPU copies from in the background."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.cpu_stream import Matrix
from moeserve.kernels.handoff import CpuExperts
from moeserve.kernels.host_pinning import pin, unpin


class PinnedPanels:
    """The only copy of the weights in RAM, pinned where it lies until this object goes: the allocator may hand the
    addresses out again. Reading them at the same time, as the pool does, is harmless."""

    def __init__(self, layers: Sequence[CpuExperts | None], device: torch.device) -> None:
        """Raises RuntimeError where the memory cannot be pinned."""
        # Of each layer uint8 [bytes] for gate, up and down; None: the layer has no experts in RAM.
        self.layers = [
            None if layer is None else [panel_bytes(m) for m in layer.matrices] for layer in layers
        ]
        if device.type == "cuda":
            self._pin()

    def of(self, layer: int) -> list[Tensor]:
        panels = self.layers[layer]
        assert panels is not None
        return panels

    def _pin(self) -> None:
        pinned: list[int] = []
        weakref.finalize(self, unpin, pinned)
        for panels in self.layers:
            for tensor in panels or []:
                pinned.append(pin(tensor))


def panel_bytes(matrix: Matrix) -> Tensor:
    """The matrix's own memory: uint8."""
    at = (ctypes.c_uint8 * matrix.bytes).from_address(matrix.address)
    return torch.from_numpy(np.ctypeslib.as_array(at))
