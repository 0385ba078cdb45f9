"""Computes how many KV slots of each kind a pool has: see `messages/slot_kinds.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moeserve.kv.layout import KvLayout
from moeserve.messages.slot_kinds import SlotKind

# Spare slots of each kind per running sequence. Among n consecutive positions, up to n / block + 2 may be of one kind.
# Running sequences hold at most five runs each: their private positions, two runs of the prefix tree (as many leaves
# have fewer branches than leaves), as many of a beam search; and one load from a tier.
SPARE_SLOTS = 12


def slot_kinds(layout: KvLayout, tokens: int, max_num_seqs: int) -> list[SlotKind]:
    """Returns the kinds of slots of a pool for `tokens` tokens; none if all slots of the model are alike. The kinds are
    large enough that running sequences never lack a slot."""
    blocks = {layout.block(layer) for layer in range(layout.num_layers)}
    return kinds_of_blocks(blocks - {1}, tokens, SPARE_SLOTS * max_num_seqs)


def kinds_of_blocks(blocks: Collection[int], tokens: int, spare: int) -> list[SlotKind]:
    """Returns the kinds of slots for blocks of these numbers of tokens. spare: slots of each kind in addition to the
    ones that `tokens` consecutive tokens need."""
    kinds: list[SlotKind] = []
    for block in sorted(blocks, reverse=True):
        ends = tokens // block + 1
        if kinds and kinds[-1].block % block == 0:
            ends -= tokens // kinds[-1].block
        kinds.append(SlotKind(block, ends + spare))
    return kinds


def rows_for(kinds: Sequence[SlotKind], block: int) -> int:
    """Returns how many rows a tensor has that holds one entry per block of `block` tokens: one for each slot of the
    kinds with blocks at least that large."""
    return sum(kind.num_slots for kind in kinds if kind.block >= block)


def num_slot_numbers(kinds: Sequence[SlotKind], tokens: int) -> int:
    """Returns how many slot numbers a pool for `tokens` tokens has."""
    return tokens + sum(kind.num_slots for kind in kinds)


def entry_bytes(layout: KvLayout, kinds: Sequence[SlotKind]) -> int:
    """Returns the bytes of all entries of compressed attention."""
    return sum(
        rows_for(kinds, layout.block(layer)) * layout.slot_bytes(layer)
        for layer in range(layout.num_layers)
        if layout.block(layer) > 1
    )


def spare_bytes(layout: KvLayout, max_num_seqs: int) -> int:
    """Returns the bytes of the spare slots of each kind, which a pool has in addition to the bytes per
    token."""
    return entry_bytes(layout, slot_kinds(layout, 0, max_num_seqs))
