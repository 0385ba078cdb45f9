"""The slots of the windowed layers' own KV pool, with reference counts.

A slot holds the keys and values of one token in the windowed layers. Running requests and segments of the prefix
tree (`window_memory.py`) may share a slot; it is free when neither holds it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import chain, compress
from operator import or_

from moeserve.router.core.memory.token_pool import TokenPool


class WindowPool:
    """Slots 0 .. num_slots-1, free or held. Each call takes time proportional to its slots."""

    __slots__ = ("_pool", "_requests", "_segments", "num_idle")

    def __init__(self, num_slots: int) -> None:
        self._pool = TokenPool(num_slots)
        self._requests = array("i", [0]) * num_slots  # number of running requests that hold each slot
        self._segments = array("i", [0]) * num_slots  # number of segments that hold each slot
        self.num_idle = 0  # slots held only by segments

    @property
    def num_slots(self) -> int:
        return self._pool.num_slots

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def alloc(self, count: int) -> array[int]:
        """Returns `count` newly allocated slots for one request. Raises PoolExhausted and allocates none if too few are
        free."""
        slots = self._pool.alloc(range(count))
        for slot in slots:
            self._requests[slot] = 1
        return slots

    def share(self, slots: Sequence[int]) -> None:
        """Adds a request's reference to slots that are held already."""
        for slot in slots:
            if not self._requests[slot]:
                self.num_idle -= 1
            self._requests[slot] += 1

    def drop(self, slots: Sequence[int]) -> None:
        """Removes a request's reference to each slot."""
        freed = array("i")
        for slot in slots:
            self._requests[slot] -= 1
            if not self._requests[slot]:
                if self._segments[slot]:
                    self.num_idle += 1
                else:
                    freed.append(slot)
        self._pool.free(freed)

    def keep(self, slots: Sequence[int]) -> None:
        """Adds a segment's reference to slots that are held already."""
        for slot in slots:
            self._segments[slot] += 1

    def unkeep(self, slots: Sequence[int]) -> None:
        """Removes a segment's reference to each slot."""
        freed = array("i")
        for slot in slots:
            self._segments[slot] -= 1
            if not self._segments[slot] and not self._requests[slot]:
                freed.append(slot)
        self.num_idle -= len(freed)
        self._pool.free(freed)

    def check(self, of_requests: Sequence[Sequence[int]], of_segments: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless every slot is free or held exactly by these. O(slots)."""
        for counts, holders in ((self._requests, of_requests), (self._segments, of_segments)):
            found = array("i", [0]) * self.num_slots
            for slot, count in Counter(chain.from_iterable(holders)).items():
                found[slot] = count
            if found != counts:
                raise AssertionError("window slots are held by others than is counted")
        held = array("i", compress(range(self.num_slots), map(or_, self._requests, self._segments)))
        self._pool.check([held])
        num_of_requests = self.num_slots - self._requests.count(0)
        if self.num_idle != len(held) - num_of_requests:
            raise AssertionError(f"{self.num_idle} idle window slots are counted")
