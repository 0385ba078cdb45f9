"""Kinds of KV slots, in models that keep an entry for each block of tokens: only the slot of a block's last token has
room for the entry.

Slots are numbered by kind: first the slots for the ends of the largest blocks, then the slots for the next size, and
after all kinds the slots for other positions, which store nothing.

    kinds of 128 and 4:     | ends of 128 | other ends of 4 | other positions |
    entries for 128 tokens: |<- a row a ->|
    entries for 4 tokens:   |<------- a row a slot -------->|
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class SlotKind(msgspec.Struct, frozen=True, array_like=True):
    """Slots for positions that end a block of `block` tokens but no block of a larger kind."""

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
