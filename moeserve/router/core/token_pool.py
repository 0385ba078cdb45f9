"""The free list of KV slots: which of the worker's KV rows nobody holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class PoolExhausted(Exception):
    """More slots were asked for than are free: a bug of the scheduler, which ought to wait."""


class TokenPool:
    """KV slots 0 .. num_slots-1, each free or held by exactly one owner. A slot holds one token's K and V in
    every layer. `alloc` and `free` cost O(count), as block copies of int32 arrays."""

    __slots__ = ("_free", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # A stack with its top at the end, highest slot at the bottom: fresh slots come out ascending, so
        # that a prompt's keys lie side by side in memory.
        self._free = array("i", range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def alloc(self, count: int) -> array[int]:
        """`count` slots, now the caller's. Raises PoolExhausted, having taken nothing."""
        left = len(self._free) - count
        if left < 0:
            raise PoolExhausted(f"{count} KV slots asked for, {len(self._free)} are free")
        taken = self._free[left:]
        del self._free[left:]
        taken.reverse()
        return taken

    def free(self, slots: array[int]) -> None:
        """Takes back what `alloc` gave; the caller forgets it."""
        self._free.extend(slots)

    def check(self, held: Iterable[array[int]]) -> None:
        """Raises AssertionError unless every slot is free or held, exactly once. O(num_slots)."""
        owners = bytearray(self.num_slots)
        for slots in (self._free, *held):
            for slot in slots:
                owners[slot] += 1
        wrong = [slot for slot, count in enumerate(owners) if count != 1]
        if wrong:
            raise AssertionError(f"KV slots not held exactly once: {wrong[:16]} (of {len(wrong)})")
