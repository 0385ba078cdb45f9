"""Experts on disk, as a worker reports them: how long a step may wait for them, and counts."""

from __future__ import annotations

import logging
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from moeserve.kernels import _C
from moeserve.messages.expert_disk import REPORT_S, ExpertDiskCounts

log = logging.getLogger(__name__)

# A step that reads all experts at this rate still counts as alive. A working disk is not slower than this; a hanging
# disk is detected by the readers' time limit.
SLOWEST_BYTES_PER_S: Final = 20e6


class DiskExperts:
    """Called by the thread that executes plans."""

    def __init__(self, native: _C.DiskExperts) -> None:
        self._native = native
        native.take_failures()  # of steps before the first request
        self._first = self._before = _counts_of(native)
        self._reported, self._reported_at = self._before, time.monotonic()

    @property
    def longest_wait_s(self) -> float:
        """Seconds that a step may wait for the disk."""
        return self._native.patience + self._native.bytes / SLOWEST_BYTES_PER_S

    @property
    def totals(self) -> ExpertDiskCounts:
        """Counts since start-up."""
        return self._before.since(self._first)

    def on_disk(self, on_gpu: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Returns uint8 [layers, experts]: 1 for an expert that neither RAM nor a GPU has now. on_gpu: [layers,
        experts], 0 for an expert that no GPU has. Between two steps."""
        absent = np.zeros(on_gpu.shape, np.bool_)
        for layer, marks in enumerate(absent):
            self._native.mark_absent(layer, marks)
        absent &= on_gpu == 0
        return absent.astype(np.uint8)

    def take_failures(self) -> list[tuple[int, str]]:
        """Returns the tokens of the last step that lacked an expert, by number, each with the cause."""
        return self._native.take_failures()

    def end_step(self) -> ExpertDiskCounts:
        """Returns the counts since the step before. Call it when the whole step is computed."""
        now = _counts_of(self._native)
        counts, self._before = now.since(self._before), now
        self._report(now)
        return counts

    def _report(self, now: ExpertDiskCounts) -> None:
        """If steps mostly wait for the disk, logs it, at most once a minute."""
        at = time.monotonic()
        seconds = at - self._reported_at
        if seconds < REPORT_S:
            return
        since = now.since(self._reported)
        self._reported, self._reported_at = now, at
        if (slowness := since.slowness(seconds)) is not None:
            log.warning("%s", slowness)


def _counts_of(native: _C.DiskExperts) -> ExpertDiskCounts:
    c = native.counts()
    times = c.waited_us / 1e3, c.busy_us / 1e3
    return ExpertDiskCounts(c.hits, c.misses, c.bytes, *times, c.predicted, c.predicted_right, c.errors)
