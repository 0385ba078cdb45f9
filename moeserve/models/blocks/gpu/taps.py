"""Copies of a step's residual before some layers, which an EAGLE-3 head reads (models/eagle3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ResidualTaps:
    def __init__(
        self,
        layers: Sequence[int],
        num_layers: int,
        rows: int,
        hidden: int,
        floats: torch.dtype,
        device: torch.device,
    ) -> None:
        """layers: the layers before which the residual is copied, in the head's order; the number of layers stands for
        after the last one. rows: rows of the largest step. floats: dtype of the copies."""
        self._columns: dict[int, list[slice]] = {}  # a layer may be read more than once
        for at, layer in enumerate(layers):
            self._columns.setdefault(layer, []).append(slice(at * hidden, (at + 1) * hidden))
        self._num_layers = num_layers
        self.rows = torch.zeros(rows, len(layers) * hidden, dtype=floats, device=device)
        # The residual after the last layer, which only the head's norm adds up; None: it is not read.
        self.last = torch.zeros(rows, hidden, device=device) if num_layers in self._columns else None

    def copy(self, layer: int, x: Tensor) -> None:
        """Launches the copy of x, float32 [n, hidden], if it is to be read: a step's residual before `layer`."""
        for columns in self._columns.get(layer, ()):
            self.rows[: len(x), columns].copy_(x)

    def copy_last(self, n: int) -> None:
        """Launches the copy of the first n rows of `last`."""
        assert self.last is not None
        self.copy(self._num_layers, self.last[:n])
