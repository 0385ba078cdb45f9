"""The snapshots of recurrent state, and which to evict when a state slot is needed.

A snapshot holds the state after the tokens of one path of the prefix tree; requests with that prefix continue from
it. All take the same memory but differ in value: without it, a request recomputes from the next snapshot towards the
root. That is a few tokens between the end of a prompt and the end of its answer, but a whole conversation if no
other snapshot of it is left.

The victim is chosen as in GreedyDual (Young, 1994), which generalises LRU to entries of different cost. A snapshot
that is taken or used gets a credit: its recompute cost plus the current clock. The snapshot with the least credit is
evicted, and the clock advances to its credit. Unused snapshots thus fall behind the clock, however costly. Evicting
a snapshot raises the cost of the next deeper one, so the last snapshot of each path is the most expensive.

The cost is weighted by how often snapshots of the same kind are used. If answers are kept verbatim, the snapshot at
an answer's end is used and the one at its prompt's end is not; if the chat template drops earlier reasoning, it is
the other way round. docs/results/kv-cache.md compares this policy with LRU.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeserve.router.core.memory.radix_node import Snapshot, SnapshotKind

MEMORY = 64  # snapshots of a kind after which older ones weigh 1/e


class SnapshotCache:
    """The snapshots in the tree, and their eviction order. `StateMemory` and `WindowMemory` own their slots."""

    def __init__(self) -> None:
        self._snapshots: set[Snapshot] = set()
        self._clock = 0.0
        self._number = 0
        # Decaying counts of snapshots per kind; each kind starts as if used once.
        self._taken = dict.fromkeys(SnapshotKind, 1.0)
        self._used = dict.fromkeys(SnapshotKind, 1.0)

    def __len__(self) -> int:
        return len(self._snapshots)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._snapshots)

    def __contains__(self, snapshot: Snapshot) -> bool:
        return snapshot in self._snapshots

    def add(self, snapshot: Snapshot) -> None:
        """Adds a snapshot that was attached to the tree."""
        keep = 1.0 - 1.0 / MEMORY
        self._taken[snapshot.kind] = keep * self._taken[snapshot.kind] + 1.0
        self._used[snapshot.kind] *= keep
        self._snapshots.add(snapshot)
        self._touch(snapshot)

    def use(self, snapshot: Snapshot) -> None:
        """Notes that a request continues from a snapshot."""
        self._used[snapshot.kind] += 1.0
        self._touch(snapshot)

    def remove(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)

    def victim(self, spared: Snapshot | None = None) -> Snapshot | None:
        """Returns the snapshot to evict, never `spared`; None if there is none. The caller removes it. O(snapshots),
        each with a walk to the next one towards the root."""
        candidates = (each for each in self._snapshots if each is not spared)
        best = min(candidates, key=lambda each: (self.credit(each), each.number), default=None)
        if best is not None:
            self._clock = max(self._clock, self.credit(best))
        return best

    def credit(self, snapshot: Snapshot) -> float:
        """Returns a snapshot's credit, in tokens above the clock."""
        use = self._used[snapshot.kind] / self._taken[snapshot.kind]
        return snapshot.touched + use * snapshot.gain

    def _touch(self, snapshot: Snapshot) -> None:
        self._number += 1
        snapshot.number = self._number
        snapshot.touched = self._clock
