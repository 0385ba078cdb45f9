"""Kinds of KV slots, in models that keep an entry for each block of tokens: a block's last token alone has room for it.

Slots are numbered by kind: first those for the ends of the largest blocks, then those of the next size, and behind all
kinds those for any other position, which hold nothing but their number.

    kinds of 128 and 4:     | ends of 128 | other ends of 4 | other positions |
    entries for 128 tokens: |<- a row a ->|
    entries for 4 tokens:   |<------- a row a slot -------->|
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class SlotKind(msgspec.Struct, frozen=True, array_like=True):
    """Slots for positions that end a block of `block` tokens, and none of a larger kind."""

    block: int
    num_slots: int


def kind_of(kinds: Sequence[SlotKind], position: int) -> int:
    """Returns the index of the kind that a position needs; len(kinds) for one that ends no block."""
    for index, kind in enumerate(kinds):
        if (position + 1) % kind.block == 0:
            return index
    return len(kinds)


def first_slots(kinds: Sequence[SlotKind]) -> list[int]:
    """Returns the number of each kind's first slot, and of the first slot for other positions."""
    firsts = [0]
    for kind in kinds:
        firsts.append(firsts[-1] + kind.num_slots)
    return firsts


class SlotCounter:
    """Slot numbers in ascending order by kind, for those who drive a worker without a router."""

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
