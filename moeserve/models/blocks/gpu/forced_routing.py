"""The routers' choice from a trace instead of the text, for measurements with random weights, which have no locality.

A CUDA graph takes a layer's logits from here instead of its router's, which are computed all the same: the choice,
its weights and its counts are made as ever, and no kernel is added. `choose` says before each step which rows of the
trace they are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class ForcedRouting:
    """Forces the routes of steps of up to `rows` rows; larger ones route as the weights say."""

    def __init__(self, layers: int, experts: int, rows: int, device: torch.device) -> None:
        self._logits = torch.zeros(layers, rows, experts, device=device)
        self._rows = rows
        self._steps = torch.zeros(0, layers, rows, experts, dtype=torch.int8)

    def load(self, ids: npt.NDArray[np.uint16]) -> None:
        """ids: [steps, rows, the model's layers, top_k], of at most as many rows as there is room for; the others
        choose any. The first layers may be elsewhere."""
        steps, rows, _, _ = ids.shape
        by_layer = ids[:, :, -len(self._logits) :].transpose(0, 2, 1, 3)
        chosen = np.zeros((steps, *self._logits.shape), np.int8)
        np.put_along_axis(chosen[:, :, :rows], by_layer.astype(np.int64), 1, axis=3)
        self._steps = torch.from_numpy(chosen).to(self._logits.device)

    def choose(self, step: int) -> None:
        """Launches: the next step is this one of `load`'s."""
        self._logits.copy_(self._steps[step])

    def logits(self, layer: int, routers: Tensor) -> Tensor:
        """[n, experts], the chosen step's in place of the layer's router's own, `routers`."""
        n = len(routers)
        return self._logits[layer, :n] if n <= self._rows else routers
