"""The part of a step's result about experts on disk: rows whose experts could not be read, and counts.

A row that lacked an expert has written wrong KV, and its request fails. The router may already have shared these KV
slots with other requests, as a prefix; their rows read the slots in the same step, or in the next one, which is already
planned. So slots with wrong KV are remembered until they are rewritten, and rows that read them fail as well. Pages of
such slots are not written to the tiers of the prefix cache, which would outlive that record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from moeserve.kernels import _C
from moeserve.messages.expert_disk import REPORT_S, ExpertDiskCounts
from moeserve.messages.pages import PageOrders
from moeserve.worker.sequences import Int32s, Sequences, StepLayout

log = logging.getLogger(__name__)

SHARED: Final = "a prefix that it shares was computed without an expert, which could not be read from disk"

Slots = npt.NDArray[np.bool_]

# A step that reads all experts at this rate still counts as alive. A working disk is not slower than this; a hanging
# disk is detected by the readers' time limit.
SLOWEST_BYTES_PER_S: Final = 20e6


class StepEnd(NamedTuple):
    failed_rows: dict[int, str]  # as in StepResult
    counts: ExpertDiskCounts  # since the step before


class DiskExperts:
    """Owns the record of wrong KV slots and states. Called by the thread that executes plans."""

    def __init__(self, native: _C.DiskExperts, num_kv_slots: int, num_state_slots: int) -> None:
        self._native = native
        self._wrong_kv: Slots = np.zeros(num_kv_slots, np.bool_)
        self._wrong_states: Slots = np.zeros(num_state_slots, np.bool_)
        self._has_wrong = False
        native.take_failures()  # of steps before the first request
        self._first = self._before = _counts_of(native)
        self._reported, self._reported_at = self._before, time.monotonic()

    def states_copied(self, pairs: Int32s) -> None:
        """Notes a plan's state copies, [n, 2]: source (-1: zeros) and target slots."""
        if not self._has_wrong:
            return
        for source, target in pairs.tolist():
            self._wrong_states[target] = source >= 0 and self._wrong_states[source]

    def is_wrong(self, slots: Int32s, *, states: bool) -> bool:
        """Returns whether any of these KV slots, or state slots, was written by a row that lacked an expert."""
        return self._has_wrong and bool((self._wrong_states if states else self._wrong_kv)[slots].any())

    def loaded(self, orders: PageOrders) -> None:
        """Notes that pages and states are loaded into slots, which are rewritten by that."""
        if not self._has_wrong:
            return
        for page in orders.loads:
            self._wrong_kv[np.frombuffer(page.slots, np.int32)] = False
        for state in orders.state_loads:
            self._wrong_states[state.slot] = False

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

    def end_step(self, layout: StepLayout, sequences: Sequences) -> StepEnd:
        """Returns the step's failed rows and counts. Call it when the whole step is computed."""
        failed: dict[int, str] = {}
        found = self._native.take_failures()
        for token, cause in found:
            row = int(np.searchsorted(layout.offset, token, side="right")) - 1
            failed.setdefault(row, cause)
        if found or self._has_wrong:
            self._wrong_kv[layout.kv_slots] = False
            self._spread(layout, sequences, failed)
            self._has_wrong = bool(self._wrong_kv.any() or self._wrong_states.any())
        if found:
            log.error("%d rows of a step failed: %s", len(failed), found[0][1])
        now = _counts_of(self._native)
        counts, self._before = now.since(self._before), now
        self._report(now)
        return StepEnd(failed, counts)

    def _spread(self, layout: StepLayout, sequences: Sequences, failed: dict[int, str]) -> None:
        """Adds the rows that read KV or states written by failed rows, in this step or an earlier one."""
        states = sequences.state_slots[layout.req_slot]
        cause = next(iter(failed.values()), SHARED)
        self._mark(failed, layout, states)
        while True:
            more = {
                row: cause
                for row in range(len(layout.req_slot))
                if row not in failed and self._reads_wrong(row, layout, sequences, states)
            }
            if not more:
                return
            failed |= more
            self._mark(more, layout, states)

    def _reads_wrong(self, row: int, layout: StepLayout, sequences: Sequences, states: Int32s) -> bool:
        if states[row] >= 0 and self._wrong_states[states[row]]:
            return True
        before = sequences.kv_slots[layout.req_slot[row], : layout.start[row]]
        return bool(self._wrong_kv[before].any())

    def _mark(self, rows: Iterable[int], layout: StepLayout, states: Int32s) -> None:
        for row in rows:
            first = layout.offset[row]
            self._wrong_kv[layout.kv_slots[first : first + layout.count[row]]] = True
            if states[row] >= 0:
                self._wrong_states[states[row]] = True

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
