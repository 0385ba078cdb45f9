"""Snapshots of recurrent state, and which of them is given up when a state slot is needed.

A snapshot is the state after exactly the tokens of one path of the prefix tree, so that a request that begins with them
continues from there. All take the same memory, but they are not worth the same: without a snapshot, a request computes
again from the next one towards the root. That is a few tokens between the end of a prompt and the end of its answer,
and a whole conversation where nothing else is left of it. So the victim is chosen as in GreedyDual (Young, 1994), the
generalisation of LRU to entries of different cost: a snapshot that is taken or used gets a credit of what its loss
would cost above a clock; the one with the least credit is evicted; the clock then advances to that credit. What is not
used falls behind the clock, however costly. The cost follows the tree: when a snapshot goes, that of the next deeper
one grows by its part, so that of every path the last snapshot is the dearest.

The cost is weighed by how often snapshots of the same kind have been used. Where answers are continued as they are, the
snapshot at an answer's end is used and that at its prompt's end is not; where the chat template drops the reasoning of
earlier answers, it is the other way round. docs/results/kv-cache.md compares it with LRU.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeserve.router.core.memory.radix_node import Snapshot, SnapshotKind

MEMORY = 64  # snapshots of a kind after which the weight of earlier ones has faded to 1/e


class SnapshotCache:
    """The snapshots that the tree holds, and their order of eviction. It owns no slots."""

    def __init__(self) -> None:
        self._snapshots: set[Snapshot] = set()
        self._clock = 0.0
        self._number = 0
        self._taken = dict.fromkeys(SnapshotKind, 1.0)  # of each kind, fading; as if each had been used once
        self._used = dict.fromkeys(SnapshotKind, 1.0)

    def __len__(self) -> int:
        return len(self._snapshots)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._snapshots)

    def __contains__(self, snapshot: Snapshot) -> bool:
        return snapshot in self._snapshots

    def add(self, snapshot: Snapshot) -> None:
        """Counts a snapshot that was put into the tree."""
        keep = 1.0 - 1.0 / MEMORY
        self._taken[snapshot.kind] = keep * self._taken[snapshot.kind] + 1.0
        self._used[snapshot.kind] *= keep
        self._snapshots.add(snapshot)
        self._touch(snapshot)

    def use(self, snapshot: Snapshot) -> None:
        """Counts a request that continues from a snapshot."""
        self._used[snapshot.kind] += 1.0
        self._touch(snapshot)

    def remove(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)

    def victim(self, spared: Snapshot | None = None) -> Snapshot | None:
        """The snapshot to evict, any but `spared`; None if there is none. The caller removes it. O(snapshots), each
        with its path up to the next one."""
        candidates = (each for each in self._snapshots if each is not spared)
        best = min(candidates, key=lambda each: (self.credit(each), each.number), default=None)
        if best is not None:
            self._clock = max(self._clock, self.credit(best))
        return best

    def credit(self, snapshot: Snapshot) -> float:
        """In tokens, above a clock of all snapshots."""
        use = self._used[snapshot.kind] / self._taken[snapshot.kind]
        return snapshot.touched + use * snapshot.gain

    def _touch(self, snapshot: Snapshot) -> None:
        self._number += 1
        snapshot.number = self._number
        snapshot.touched = self._clock
