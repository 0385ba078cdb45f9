"""Router choices replayed from a trace, for measurements with random weights, whose own choices have no locality.

A CUDA graph still computes the router's logits, then replaces them by the trace's. The choice of experts, their
weights and the counts follow as usual, without a further kernel. `choose` sets the trace's step before each step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class ForcedRouting:
    """Replays choices in steps of up to `rows` rows; larger steps use the router's own."""

    def __init__(self, layers: int, experts: int, rows: int, device: torch.device) -> None:
        self._logits = torch.zeros(layers, rows, experts, device=device)
        self._rows = rows
        self._steps = torch.zeros(0, layers, rows, experts, dtype=torch.int8)

    def load(self, ids: npt.NDArray[np.uint16]) -> None:
        """Takes a trace. ids: [steps, rows, the model's layers, top_k], the chosen experts. `rows` is at most the
        constructor's; in a step, rows beyond it choose arbitrary experts. If the first layers are not on this GPU,
        their ids are ignored."""
        steps, rows, _, _ = ids.shape
        by_layer = ids[:, :, -len(self._logits) :].transpose(0, 2, 1, 3)
        chosen = np.zeros((steps, *self._logits.shape), np.int8)
        np.put_along_axis(chosen[:, :, :rows], by_layer.astype(np.int64), 1, axis=3)
        self._steps = torch.from_numpy(chosen).to(self._logits.device)

    def choose(self, step: int) -> None:
        """Launches the copy of the trace's step number `step`, for the next step."""
        self._logits.copy_(self._steps[step])

    def logits(self, layer: int, routers: Tensor) -> Tensor:
        """Returns [n, experts]: the trace's logits for this layer in place of `routers`, the router's own."""
        n = len(routers)
        return self._logits[layer, :n] if n <= self._rows else routers
