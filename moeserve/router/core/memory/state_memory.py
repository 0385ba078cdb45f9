"""Owns every recurrent-state slot. After every call, each slot is free, a running request's, a snapshot's, or a
load's.

A running request has one slot, which each of its rows advances; a beam search has one per beam. The worker executes
`copies` before the rows of the plan that carries them, so after all rows of earlier plans:

    bind       zero, or snapshot -> running     in the plan being built, before its rows
    copy       running -> running               in the plan after the one whose result forked a beam
    take       running -> snapshot              in the plan after the one whose row ended at the snapshot point
    keep       (no copy)                        the running slot becomes the snapshot when its request leaves

A load from a tier uses a separate slot until it has ended.

A freed slot may be reused at once, because earlier copies and rows that use it are executed first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from moeserve.messages.router_metrics import LoadReport
from moeserve.router.core.memory.held import HeldSequence
from moeserve.router.core.memory.radix_cache import RadixCache
from moeserve.router.core.memory.radix_node import Node, Snapshot, SnapshotKind
from moeserve.router.core.memory.snapshots import SnapshotCache

ZERO = -1  # copy source that means zeros


class StateMemory:
    """Owns the state slots of requests and snapshots. The only writer of a request's `state_slot` and of the
    snapshots in the tree's nodes."""

    def __init__(self, num_slots: int, tree: RadixCache, totals: LoadReport) -> None:
        """num_slots: at least the number of requests that may run at once."""
        self.num_slots = num_slots
        self._free = array("i", range(num_slots - 1, -1, -1))
        self._tree = tree
        self._snapshots = SnapshotCache()
        self._copies = array("i")  # (source, destination) pairs for the next plan
        self._loading: set[int] = set()
        self._totals = totals

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def num_running(self) -> int:
        return self.num_slots - len(self._free) - len(self._snapshots) - len(self._loading)

    # ---------------------------------------------------------------- running

    def bind(self, request: HeldSequence, source: Snapshot | None) -> None:
        """Assigns a slot to a request, initialised with the state of `source`, or with zeros if None."""
        if source is not None:
            self._totals.state_snapshot_hits += 1
            self._snapshots.use(source)
        slot = self._take_slot(spared=source)
        if slot is None:
            assert source is not None, "there is a state slot for every running request"
            slot = self._give_up(source)  # the last snapshot: its slot becomes the request's
        else:
            self._copies.extend((ZERO if source is None else source.slot, slot))
        request.state_slot = slot

    def take_more(self, count: int) -> list[int]:
        """Returns additional slots for the beams of a request; their contents are undefined."""
        slots = [slot for _ in range(count) if (slot := self._take_slot(spared=None)) is not None]
        assert len(slots) == count, "there is a state slot for every sequence that runs"
        return slots

    def free_more(self, slots: list[int]) -> None:
        self._free.extend(slots)

    def copy(self, source: int, target: int) -> None:
        """Adds a copy of one beam's state to another's to the next plan."""
        self._copies.extend((source, target))

    def free(self, request: HeldSequence) -> None:
        """Takes back a request's slot without making a snapshot."""
        self._free.append(request.state_slot)
        request.state_slot = -1

    # ---------------------------------------------------------------- snapshots

    def take(self, request: HeldSequence, node: Node, kind: SnapshotKind) -> None:
        """Copies a running request's state into a snapshot at `node`, where its tokens end; does nothing if all
        slots belong to running requests."""
        slot = self._take_slot(spared=None)
        if slot is None:
            return
        self._copies.extend((request.state_slot, slot))
        self._put(node, Snapshot(slot, len(request.slots), kind))

    def keep(self, request: HeldSequence, node: Node, kind: SnapshotKind) -> None:
        """Turns the slot of a request that leaves into the snapshot at `node`, where its tokens end; frees it if
        `node` already has one."""
        if node.snapshot is not None:
            self.free(request)
            return
        self._put(node, Snapshot(request.state_slot, request.num_planned, kind))
        request.state_slot = -1

    def reclaim(self) -> None:
        """Takes back the slots of snapshots whose KV the tree evicted."""
        for snapshot in self._tree.take_dropped():
            self._snapshots.remove(snapshot)
            self._free.append(snapshot.slot)

    def clear(self) -> None:
        """Forgets the pending copies after the tree was cleared. No request may be running."""
        self.reclaim()
        self._copies = array("i")

    def take_copies(self) -> bytes:
        """Returns the copies for a plan that is sent now, as StepPlan.state_copies."""
        copies, self._copies = self._copies.tobytes(), array("i")
        return copies

    # ---------------------------------------------------------------- tiers

    def is_copied(self, snapshot: Snapshot) -> bool:
        """Returns whether the snapshot's slot will hold its state once the plans sent so far are executed."""
        return snapshot.slot not in self._copies[1::2]

    def take_for_load(self, max_running: int) -> int | None:
        """Returns a slot into which a state is loaded from a tier, unused by requests until `loaded`. None if it
        could be needed for one of `max_running` requests."""
        if len(self._loading) + max_running >= self.num_slots:
            return None
        slot = self._take_slot(spared=None)
        assert slot is not None
        self._loading.add(slot)
        return slot

    def loaded(self, slot: int, position: int, node: Node | None) -> None:
        """Ends a load: its slot becomes the snapshot after `position` tokens at the end of `node`. If `node` is None
        or has a snapshot, the slot is freed."""
        self._loading.remove(slot)
        if node is None or node.snapshot is not None:
            self._free.append(slot)
        else:
            self._put(node, Snapshot(slot, position, SnapshotKind.PROMPT))

    def _put(self, node: Node, snapshot: Snapshot) -> None:
        self._tree.set_snapshot(node, snapshot)
        self._snapshots.add(snapshot)

    def _take_slot(self, spared: Snapshot | None) -> int | None:
        if self._free:
            return self._free.pop()
        victim = self._snapshots.victim(spared)
        if victim is None:
            return None
        self._totals.state_snapshot_evictions += 1
        return self._give_up(victim)

    def _give_up(self, snapshot: Snapshot) -> int:
        self._tree.unset_snapshot(snapshot)
        self._snapshots.remove(snapshot)
        return snapshot.slot

    # ---------------------------------------------------------------- invariants

    def check(self, running: Iterable[HeldSequence]) -> None:
        """Raises AssertionError unless every slot is free, one running request's, or one snapshot's. O(slots +
        nodes)."""
        in_tree = list(self._tree.snapshots())
        if set(in_tree) != set(self._snapshots):
            raise AssertionError("the tree has other snapshots than are counted")
        held = [*self._free, *(slot for r in running for slot in r.state_slots), *(s.slot for s in in_tree)]
        held += self._loading
        if sorted(held) != list(range(self.num_slots)):
            raise AssertionError(f"state slots not held exactly once: {sorted(held)} of {self.num_slots}")
