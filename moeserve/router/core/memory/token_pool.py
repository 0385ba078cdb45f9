"""The free list of the KV slots."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from moeserve.messages.slot_kinds import SlotKind, first_slots, kind_of


class PoolExhausted(Exception):
    """More slots were requested than are free. This is a scheduler bug: it must wait instead."""


class TokenPool:
    """KV slots for `num_slots` tokens, each slot free or owned by exactly one caller. A slot holds the keys and values
    of one token in every layer. `alloc` and `free` copy blocks of int32: O(count).

    If positions have kinds, a slot is of one kind, which its number tells, and holds only positions of that kind. Each
    kind has enough slots for running requests while fewer than num_slots tokens are held; the prefix cache may find no
    slot of a kind.
    """

    __slots__ = ("_firsts", "_free", "_kinds", "_num_used", "num_slots")

    def __init__(self, num_slots: int, kinds: Sequence[SlotKind] = ()) -> None:
        self.num_slots = num_slots
        self._kinds = kinds
        self._firsts = first_slots(kinds)
        self._num_used = 0
        # By kind a stack with its top at the end and the highest slot at the bottom: new slots are allocated in
        # ascending order, so that a prompt's keys are contiguous in memory.
        counts = [*(kind.num_slots for kind in kinds), num_slots]
        self._free = [
            array("i", range(first + count - 1, first - 1, -1))
            for first, count in zip(self._firsts, counts, strict=True)
        ]

    @property
    def num_free(self) -> int:
        """Number of tokens for which slots are free."""
        return self.num_slots - self._num_used

    def lacking(self, positions: Sequence[int]) -> int:
        """Returns how many slots must be freed, at least, before `alloc` can succeed."""
        missing = max(0, len(positions) - self.num_free)
        if self._kinds:
            needed = Counter(kind_of(self._kinds, position) for position in positions)
            missing = max(missing, *(count - len(self._free[kind]) for kind, count in needed.items()), 0)
        return missing

    def alloc(self, positions: Sequence[int]) -> array[int]:
        """Allocates a slot for each position. Raises PoolExhausted and allocates none if too few are free."""
        if self.lacking(positions):
            raise PoolExhausted(f"{len(positions)} KV slots requested, {self.num_free} are free")
        self._num_used += len(positions)
        if self._kinds:
            return array("i", [self._free[kind_of(self._kinds, position)].pop() for position in positions])
        (free,) = self._free
        left = len(free) - len(positions)
        taken = free[left:]
        del free[left:]
        taken.reverse()
        return taken

    def free(self, slots: array[int]) -> None:
        """Frees slots that `alloc` returned."""
        self._num_used -= len(slots)
        if not self._kinds:
            self._free[0].extend(slots)
            return
        for slot in slots:
            self._free[bisect_right(self._firsts, slot) - 1].append(slot)

    def check(self, held: Iterable[array[int]]) -> None:
        """Raises AssertionError unless every slot is either free or in `held`, exactly once. O(num_slots)."""
        every = array("i")
        for free in self._free:
            every.extend(free)
        num_free = len(every)
        for slots in held:
            every.extend(slots)
        distinct, total = set(every), self._firsts[-1] + self.num_slots
        if len(every) == len(distinct) == total and min(every) >= 0 and max(every) < total:
            if len(every) - num_free != self._num_used:
                raise AssertionError(
                    f"{self._num_used} KV slots are counted, {len(every) - num_free} are held"
                )
            return
        owners = Counter(every)
        wrong = [slot for slot in distinct.union(range(total)) if owners[slot] != 1]
        raise AssertionError(f"KV slots not held exactly once: {sorted(wrong)[:16]} (of {len(wrong)})")
