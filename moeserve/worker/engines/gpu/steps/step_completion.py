"""Waits for a step on the GPU, and measures its duration."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class StepCompletion:
    """Waits for work launched on the current stream, and downloads sampled tokens.

    CUDA waits by spinning on a core. If the CPU pool, which computes experts meanwhile, uses all cores, spinning
    would take one from it; with `yields` the thread sleeps until the GPU's interrupt instead. Sleeping costs a step
    up to 0.9 ms: docs/results/experts-in-ram.md.
    """

    def __init__(self, device: torch.device, head_rows: int, *, yields: bool) -> None:
        self._is_gpu = device.type == "cuda"
        self._tokens = torch.empty(head_rows, dtype=torch.int32, pin_memory=self._is_gpu)
        made = (torch.cuda.Event(enable_timing=True, blocking=yields) for _ in range(3 * self._is_gpu))
        # the end of this step; the end of the previous one or this one's start; where this step's layers begin
        self._ends = list(made)
        self._has_before = self._has_layers = False
        self.layers_ms = 0.0

    def begin(self) -> None:
        """Marks the start of a step while none is in progress; its duration counts from here."""
        if self._is_gpu:
            self._ends[1].record()
            self._has_before = True

    def mark_layers(self) -> None:
        """Marks the beginning of a step's layers: the GPU may have waited for them. Not called again before
        `finish`."""
        if self._is_gpu:
            self._ends[2].record()
            self._has_layers = True

    def mark(self) -> None:
        """Marks the end of the work launched so far."""
        if self._is_gpu:
            self._ends[0].record()

    @property
    def is_reached(self) -> bool:
        """Returns whether the work marked last is done."""
        return not self._is_gpu or bool(self._ends[0].query())

    def wait(self) -> None:
        """Waits for the work marked last."""
        if self._is_gpu:
            self._ends[0].synchronize()

    def finish(self) -> float:
        """Waits for a step's last mark. Returns its milliseconds by the GPU's clock, from its start or, if launched
        ahead, from the end of the previous step; 0: unknown. The host's clock would include launching another step.
        `layers_ms` becomes the part from `mark_layers` on; 0: not marked."""
        self.wait()
        if not self._is_gpu:
            return 0.0
        end, before, layers = self._ends
        interval = float(before.elapsed_time(end)) if self._has_before else 0.0
        self.layers_ms = float(layers.elapsed_time(end)) if self._has_layers else 0.0
        self._ends = [before, end, layers]
        self._has_before, self._has_layers = True, False
        return interval

    def bring(self, tokens: Tensor) -> None:
        """Launches the download of up to head_rows tokens (int32, on the GPU), and an event after it."""
        self._tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        self.mark()

    def brought(self, count: int) -> NDArray[np.int32]:
        """Waits for the download and returns its first `count` tokens, an int32 array that the caller owns."""
        self.wait()
        return self._tokens[:count].numpy().copy()
