"""Remembers the KV slots and states that are wrong because rows lacked weights that could not be read from disk.

A row that lacked weights has written wrong KV, and its request fails. The router may already have shared these KV
slots with other requests, as a prefix; their rows read the slots in the same step, or in the next one, which is already
planned. So slots with wrong KV are remembered until they are rewritten, and rows that read them fail as well. Pages of
such slots are not written to the tiers of the prefix cache, which would outlive that record.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from moeserve.messages.pages import PageOrders
from moeserve.worker.sequences import Int32s, Sequences, StepLayout

log = logging.getLogger(__name__)

SHARED: Final = "a prefix that it shares was computed without weights, which could not be read from disk"

Slots = npt.NDArray[np.bool_]


class WrongSlots:
    """Owns the record. Called by the thread that executes plans."""

    def __init__(self, num_kv_slots: int, num_state_slots: int) -> None:
        self._wrong_kv: Slots = np.zeros(num_kv_slots, np.bool_)
        self._wrong_states: Slots = np.zeros(num_state_slots, np.bool_)
        self._has_wrong = False

    def states_copied(self, pairs: Int32s) -> None:
        """Notes a plan's state copies, [n, 2]: source (-1: zeros) and target slots."""
        if not self._has_wrong:
            return
        for source, target in pairs.tolist():
            self._wrong_states[target] = source >= 0 and self._wrong_states[source]

    def is_wrong(self, slots: Int32s, *, states: bool) -> bool:
        """Returns whether any of these KV slots, or state slots, was written by a row that lacked weights."""
        return self._has_wrong and bool((self._wrong_states if states else self._wrong_kv)[slots].any())

    def loaded(self, orders: PageOrders) -> None:
        """Notes that pages and states are loaded into slots, which are rewritten by that."""
        if not self._has_wrong:
            return
        for page in orders.loads:
            self._wrong_kv[np.frombuffer(page.slots, np.int32)] = False
        for state in orders.state_loads:
            self._wrong_states[state.slot] = False

    def end_step(
        self, layout: StepLayout, sequences: Sequences, found: Iterable[tuple[int, str]]
    ) -> dict[int, str]:
        """Returns the step's failed rows, as in StepResult. found: the step's tokens that lacked weights, by number,
        and the causes. Call it when the whole step is computed."""
        failed: dict[int, str] = {}
        for token, cause in found:
            row = int(np.searchsorted(layout.offset, token, side="right")) - 1
            failed.setdefault(row, cause)
        has_new = bool(failed)
        if has_new:
            log.error("rows of a step failed: %s", next(iter(failed.values())))
        if has_new or self._has_wrong:
            self._wrong_kv[layout.kv_slots] = False
            self._spread(layout, sequences, failed)
            self._has_wrong = bool(self._wrong_kv.any() or self._wrong_states.any())
        return failed

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
