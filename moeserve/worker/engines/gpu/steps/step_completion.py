"""How the host waits for a step on the GPU, and learns how long it took."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class StepCompletion:
    """Waits for what was launched on the current stream, and brings sampled tokens over.

    CUDA waits by spinning on a core. Where the threads of the CPU pool, which computes experts at the same time, have
    all cores, that is one of theirs, so there (`yields`) the thread sleeps until the GPU's interrupt. A sleep costs a
    step up to 0.9 ms: docs/results/experts-in-ram.md.
    """

    def __init__(self, device: torch.device, head_rows: int, *, yields: bool) -> None:
        self._is_gpu = device.type == "cuda"
        self._tokens = torch.empty(head_rows, dtype=torch.int32, pin_memory=self._is_gpu)
        made = (torch.cuda.Event(enable_timing=True, blocking=yields) for _ in range(2 * self._is_gpu))
        self._ends = list(made)  # of this step, then of the one before, or where this one began
        self._has_before = False

    def begin(self) -> None:
        """A step begins, while none is under way: its time is counted from here."""
        if self._is_gpu:
            self._ends[1].record()
            self._has_before = True

    def mark(self) -> None:
        """Marks the end of the work launched so far, for which `wait` then waits."""
        if self._is_gpu:
            self._ends[0].record()

    @property
    def is_reached(self) -> bool:
        """Whether all that was marked last has been computed."""
        return not self._is_gpu or bool(self._ends[0].query())

    def wait(self) -> None:
        """Waits until the work marked last has been computed."""
        if self._is_gpu:
            self._ends[0].synchronize()

    def finish(self) -> float:
        """Waits for the last mark of a step. Returns the milliseconds from its beginning to then, or from the end of
        the step before if it was launched ahead, by the GPU's clock: the host may have been launching another
        meanwhile. 0: not known."""
        self.wait()
        if not self._is_gpu:
            return 0.0
        end, before = self._ends
        interval = float(before.elapsed_time(end)) if self._has_before else 0.0
        self._ends.reverse()
        self._has_before = True
        return interval

    def bring(self, tokens: Tensor) -> None:
        """Launches the copy of up to head_rows tokens, and marks it."""
        self._tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        self.mark()

    def brought(self, count: int) -> NDArray[np.int32]:
        """Waits for them. The array is the caller's."""
        self.wait()
        return self._tokens[:count].numpy().copy()
