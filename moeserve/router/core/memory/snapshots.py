"""Snapshots of recurrent state, and the choice of the one to give up when a state slot is needed.

A snapshot is the state after exactly the tokens of one path of the prefix tree, so that a request that begins with them
continues from there. All take the same memory, but they are not worth the same: without a snapshot, a request computes
again from the next one towards the root. That is a few tokens between the end of a prompt and the end of its answer,
but a whole conversation if no other snapshot of it is left.

So the victim is chosen as in GreedyDual (Young, 1994), the generalisation of LRU to entries of different cost. A
snapshot that is taken or used gets a credit: the cost of its loss, added to a clock. The snapshot with the least credit
is evicted, and the clock advances to that credit. A snapshot that is not used falls behind the clock, however costly.
The cost follows the tree: when a snapshot goes, the cost of the next deeper one grows by its part, so that the last
snapshot of every path is the dearest.

The cost is weighed by how often snapshots of the same kind have been used. Where answers are continued as they are, the
snapshot at an answer's end is used and the one at its prompt's end is not; where the chat template drops the reasoning
of earlier answers, it is the other way round. docs/results/kv-cache.md compares it with LRU."""

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
        # Snapshots of each kind, fading; each kind begins as if used once.
        self._taken = dict.fromkeys(SnapshotKind, 1.0)
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
        """The snapshot to evict, never `spared`; None if there is none. The caller removes it. O(snapshots): each
        climbs the tree to the next one."""
        candidates = (each for each in self._snapshots if each is not spared)
        best = min(candidates, key=lambda each: (self.credit(each), each.number), default=None)
        if best is not None:
            self._clock = max(self._clock, self.credit(best))
        return best

    def credit(self, snapshot: Snapshot) -> float:
        """A snapshot's credit, in tokens above the clock."""
        use = self._used[snapshot.kind] / self._taken[snapshot.kind]
        return snapshot.touched + use * snapshot.gain

    def _touch(self, snapshot: Snapshot) -> None:
        self._number += 1
        snapshot.number = self._number
        snapshot.touched = self._clock
