"""The free list of the KV slots."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable


class PoolExhausted(Exception):
    """More slots were requested than are free. This is a scheduler bug: it must wait instead."""


class TokenPool:
    """KV slots 0 .. num_slots-1, each free or owned by exactly one caller. A slot holds the keys and values of one
    token in every layer. `alloc` and `free` copy blocks of int32: O(count)."""

    __slots__ = ("_free", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # A stack with its top at the end and the highest slot at the bottom: new slots are allocated in ascending
        # order, so that a prompt's keys are contiguous in memory.
        self._free = array("i", range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> array[int]:
        """Allocates `count` slots: int32 [count]. Raises PoolExhausted and allocates none if too few are free."""
        left = len(self._free) - count
        if left < 0:
            raise PoolExhausted(f"{count} KV slots requested, {len(self._free)} are free")
        taken = self._free[left:]
        del self._free[left:]
        taken.reverse()
        return taken

    def free(self, slots: array[int]) -> None:
        """Frees slots that `alloc` returned."""
        self._free.extend(slots)

    def check(self, held: Iterable[array[int]]) -> None:
        """Raises AssertionError unless every slot is either free or in `held`, exactly once. O(num_slots)."""
        every = self._free[:]
        for slots in held:
            every.extend(slots)
        distinct = set(every)
        if len(every) == len(distinct) == self.num_slots and min(every) >= 0 and max(every) < self.num_slots:
            return
        owners = Counter(every)
        wrong = [slot for slot in distinct.union(range(self.num_slots)) if owners[slot] != 1]
        raise AssertionError(f"KV slots not held exactly once: {sorted(wrong)[:16]} (of {len(wrong)})")
