"""Pins the CPU pool's expert panels, so that a GPU can copy them in the background."""

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
    """The only copy of the weights in RAM, pinned in place during this object's life: afterwards the allocator may
    reuse the addresses. The pool may read them at the same time."""

    def __init__(self, layers: Sequence[CpuExperts | None], device: torch.device) -> None:
        """Raises RuntimeError if the memory cannot be pinned, with the amounts that were and should be."""
        # Per layer, uint8 [bytes] for each matrix with memory of its own; None: no experts in RAM.
        self.layers = [
            None if layer is None else [panel_bytes(m) for m in layer.own_matrices] for layer in layers
        ]
        if device.type == "cuda":
            self._pin()

    def of(self, layer: int) -> list[Tensor]:
        """Returns the panels of a layer's own matrices: uint8, in RAM."""
        panels = self.layers[layer]
        assert panels is not None
        return panels

    def _pin(self) -> None:
        pinned: list[int] = []
        weakref.finalize(self, unpin, pinned)
        every = [tensor for panels in self.layers for tensor in panels or []]
        for tensor in every:
            try:
                pinned.append(pin(tensor))
            except RuntimeError as error:
                done, wanted = (sum(t.nbytes for t in of) >> 20 for of in (every[: len(pinned)], every))
                raise RuntimeError(f"{error}, after {done:,} of {wanted:,} MiB") from error


def panel_bytes(matrix: Matrix) -> Tensor:
    """Returns the matrix's own memory as uint8."""
    at = (ctypes.c_uint8 * matrix.bytes).from_address(matrix.address)
    return torch.from_numpy(np.ctypeslib.as_array(at))
