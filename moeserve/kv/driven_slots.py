"""KV slots for programs that drive a worker without a router."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeserve.messages.slot_kinds import SlotKind, first_slots, kind_of


class SlotCounter:
    """Slot numbers in ascending order by kind."""

    def __init__(self, kinds: Sequence[SlotKind]) -> None:
        self._kinds = kinds
        self._next = first_slots(kinds)

    def take(self, first: int, count: int) -> bytes:
        """Returns slots for `count` positions from `first` on, int32."""
        slots = []
        for position in range(first, first + count):
            kind = kind_of(self._kinds, position)
            slots.append(self._next[kind])
            self._next[kind] += 1
        return np.array(slots, np.int32).tobytes()


def slots_in_turn(kinds: Sequence[SlotKind], batch: int, seq: int, start: int, count: int) -> bytes:
    """Returns slots, int32, for `count` positions from `start` on of sequence `seq`. The slots of each kind interleave
    `batch` sequences token by token, as in a server that decodes them together."""
    ends = np.arange(1, start + count + 1, dtype=np.int32)
    needed = np.full(len(ends), len(kinds), np.int32)
    for kind in reversed(range(len(kinds))):
        needed[ends % kinds[kind].block == 0] = kind
    slots = np.empty(len(needed), np.int32)
    for kind, first in enumerate(first_slots(kinds)):
        of_kind = needed == kind
        slots[of_kind] = first + np.arange(np.count_nonzero(of_kind), dtype=np.int32) * batch + seq
    return slots[start:].tobytes()
