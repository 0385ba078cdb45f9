"""The KV slots of sliding-window layers: which requests hold them, and which the prefix tree keeps.

A windowed layer attends to the last `window` tokens. So a running request holds window slots for the `window - 1`
positions before its next row, and for the row itself:

    position   0 ................... window_first ................. len(slots)
               | dropped              | window_slots                 |  not planned yet

**When slots are dropped.** A plan writes the KV of all rows of a layer before any row attends. So a slot read for
the last time by a row of plan N can be reused in plan N + 1, but not in N: `begin_rows` drops slots before any row
is planned.

**Segments.** A request can continue at position p if the window slots of the `window - 1` positions before p exist
(all of them, if p is less than the window). The tree keeps window slots where a continuation is likely: at snapshot
points of prompts, at a prompt's end, and where a request ended or was preempted. A segment is a `Snapshot` at the
end of a node that holds slots. Overlapping segments and requests share slots. Unlike a snapshot of recurrent state,
a segment serves every position after its first `window - 1` tokens: if its node is split there, the upper part gets
its own segment.

The segment at the end of a prompt's chunk holds all slots of the chunk, so that another prompt may diverge anywhere
in it.

**Size.** The pool has at least `least_slots`, so that running requests cannot exhaust it; the rest holds segments.
When slots are needed, long segments are first shortened to the slots that their snapshot points need, least recently
used first; then segments are evicted in the order of snapshots (`snapshots.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from dataclasses import replace

from moeserve.messages.router_metrics import LoadReport
from moeserve.router.core.memory.held import HeldSequence
from moeserve.router.core.memory.radix_cache import RadixCache
from moeserve.router.core.memory.radix_node import Node, Snapshot, SnapshotKind, depth
from moeserve.router.core.memory.snapshot_points import SnapshotPoint, SnapshotSpacing, snapshot_points
from moeserve.router.core.memory.snapshots import SnapshotCache
from moeserve.router.core.memory.window_pool import WindowPool


def least_slots(window: int, max_running: int, max_num_batched_tokens: int) -> int:
    """Returns the maximum number of window slots that running requests hold at once."""
    return max_running * (window - 1) + max_num_batched_tokens


class Segment(Snapshot):
    """The window slots of positions `first` .. `position` - 1 of a path."""

    __slots__ = ("first", "slots", "window")

    def __init__(self, first: int, slots: array[int], window: int, kind: SnapshotKind) -> None:
        super().__init__(-1, first + len(slots), kind)
        self.first = first
        self.slots = slots
        self.window = window

    def serves(self, position: int) -> bool:
        return self.first <= max(0, position - self.window + 1) and position <= self.position

    def before(self, position: int) -> array[int]:
        """Returns the slots that a request needs to continue at `position`, which the segment must serve."""
        return self.slots[max(0, position - self.window + 1) - self.first : position - self.first]


class WindowMemory:
    """Owns the windowed layers' slots of requests and segments. The only writer of a request's
    `window_slots`, `window_first` and `window_points`, and of the tree's segments."""

    def __init__(
        self, num_slots: int, window: int, tree: RadixCache, spacing: SnapshotSpacing, totals: LoadReport
    ) -> None:
        """spacing: distances of segments within a prompt. Unlike those of snapshots they are constant, because a
        segment costs no step."""
        self.window = window
        self._pool = WindowPool(num_slots)
        self._tree = tree
        self._spacing = replace(spacing, is_even=True)
        self._segments = SnapshotCache()
        self._running: dict[HeldSequence, None] = {}
        # Long segments of chunks, with the position from which on slots remain when they are shortened (None: none
        # remain). `_live`: those of chunks in the last plan, whose requests still hold all of the slots.
        self._live: dict[HeldSequence, tuple[Segment, int | None]] = {}
        self._long: dict[Segment, int | None] = {}  # in order of use
        self._totals = totals
        tree.on_split = self._split

    @property
    def num_slots(self) -> int:
        return self._pool.num_slots

    @property
    def num_cached(self) -> int:
        """Number of slots that only segments hold, and no running request."""
        return self._pool.num_idle

    @property
    def num_held(self) -> int:
        return self._pool.num_slots - self._pool.num_free - self._pool.num_idle

    # ---------------------------------------------------------------- running

    def attach(self, request: HeldSequence, num_matched: int) -> None:
        """Gives a newly bound request the window before its next row. The tree has the full layers' KV of its first
        `num_matched` tokens."""
        start = len(request.slots)
        request.window_first = max(0, start - self.window + 1)
        request.window_points = snapshot_points(start, num_matched, request.num_prompt, self._spacing)
        self._running[request] = None
        if start:
            assert request.node is not None
            segment = request.node.snapshot
            assert isinstance(segment, Segment)
            request.window_slots = segment.before(start)
            self._pool.share(request.window_slots)
            self._totals.window_hits += 1
            if segment in self._segments:
                self._segments.use(segment)
            elif segment in self._long:
                self._long[segment] = self._long.pop(segment)

    def take(self, count: int) -> array[int]:
        """Allocates `count` slots, shortening and evicting segments if needed."""
        while self._pool.num_free < count:
            if self._long:
                self._shorten(next(iter(self._long)))
                continue
            victim = self._segments.victim()
            assert isinstance(victim, Segment), "running requests never exhaust the windowed pool"
            self._totals.window_evictions += 1
            self._tree.unset_snapshot(victim)
            self._segments.remove(victim)
            self._pool.unkeep(victim.slots)
        return self._pool.alloc(count)

    def begin_rows(self) -> None:
        """Drops slots that no later row reads."""
        for request in list(self._live):
            self._settle(request)
        for request in self._running:
            if request.beams is not None:
                self._pool.drop(request.beams.drop_windows(self.window - 1))
            first = request.next_position - self.window + 1
            unread = min(first - request.window_first, len(request.window_slots))
            if unread > 0:
                self._pool.drop(request.window_slots[:unread])
                del request.window_slots[:unread]
                request.window_first += unread

    def leave(self, request: HeldSequence, node: Node | None, end: int, kind: SnapshotKind) -> None:
        """Takes back all slots of a request, after making a segment at `node`, where its `end` known tokens end;
        None: no segment."""
        self._settle(request)
        if node is not None:
            self._keep(request, node, end, kind)
        self._pool.drop(request.window_slots)
        request.window_slots = array("i")
        request.window_first = 0
        request.window_points = []
        self._running.pop(request, None)
        self.reclaim()

    def free_beams(self, request: HeldSequence) -> None:
        """Takes back the slots of dropped beams."""
        assert request.beams is not None
        self._pool.drop(request.beams.take_freed_windows())

    # ---------------------------------------------------------------- segments

    def passed_points(self, request: HeldSequence, end: int) -> Iterator[SnapshotPoint]:
        """Removes and yields the request's snapshot points up to `end`, where a chunk ends, in ascending order."""
        while request.window_points and request.window_points[0][0] <= end:
            yield request.window_points.pop(0)

    def keep_segment_at(self, request: HeldSequence, node: Node | None, point: SnapshotPoint) -> None:
        """Makes a segment at a point that a chunk has passed, at the end of `node`; None: the tree has no node
        there."""
        if node is not None:
            self._keep(request, node, *point)

    def keep_chunk(self, request: HeldSequence, node: Node | None, end: int, first: int | None) -> None:
        """Makes a long segment at the end of `node`, of all slots of the chunk that ends at position `end`.
        first: when the segment is shortened later, its slots from this position on are kept; None: it is
        removed instead."""
        if node is None or node.snapshot is not None or node.parent is None:
            return
        slots = request.window_slots[: end - request.window_first]
        if len(slots) < end - request.window_first:
            return
        segment = Segment(request.window_first, slots, self.window, SnapshotKind.PROMPT)
        self._pool.keep(slots)
        self._tree.set_snapshot(node, segment)
        self._live[request] = (segment, first)

    def reclaim(self) -> None:
        """Takes back the slots of segments whose nodes the tree evicted."""
        for segment in self._tree.take_dropped():
            assert isinstance(segment, Segment)
            if segment in self._segments:
                self._segments.remove(segment)
            self._long.pop(segment, None)
            self._pool.unkeep(segment.slots)

    def _settle(self, request: HeldSequence) -> None:
        """Notes that the request no longer holds all slots of its last chunk."""
        if request not in self._live:
            return
        segment, first = self._live.pop(request)
        if segment.node is not None:
            self._long[segment] = first

    def _shorten(self, segment: Segment) -> None:
        first = self._long.pop(segment)
        if first is None:
            self._tree.unset_snapshot(segment)
            self._pool.unkeep(segment.slots)
            return
        unread = max(0, first - segment.first)
        self._pool.unkeep(segment.slots[:unread])
        del segment.slots[:unread]
        segment.first += unread
        self._segments.add(segment)

    def _keep(self, request: HeldSequence, node: Node, end: int, kind: SnapshotKind) -> None:
        """Makes a segment that ends at `end`, the end of `node`, unless it has one or the request lacks some of the
        slots."""
        begin = max(0, end - self.window + 1) - request.window_first
        slots = request.window_slots[max(0, begin) : end - request.window_first]
        if begin < 0 or len(slots) < min(end, self.window - 1):
            return
        self._put(node, slots, end, kind)

    def _split(self, upper: Node, snapshot: Snapshot) -> None:
        """Gives the upper part of a split node a segment, if the node's segment serves it."""
        position = depth(upper)
        if isinstance(snapshot, Segment) and snapshot.serves(position):
            self._put(upper, snapshot.before(position), position, SnapshotKind.BRANCH)

    def _put(self, node: Node, slots: array[int], end: int, kind: SnapshotKind) -> None:
        if node.snapshot is not None or node.parent is None or not slots:
            return
        segment = Segment(end - len(slots), slots, self.window, kind)
        self._pool.keep(slots)
        self._tree.set_snapshot(node, segment)
        self._segments.add(segment)

    # ---------------------------------------------------------------- invariants

    def check(self, running: Collection[HeldSequence]) -> None:
        """Raises AssertionError unless every slot is free or held by running requests and segments as counted, and
        every segment has the slots of its positions. O(slots + nodes)."""
        segments = [segment for segment in self._tree.snapshots() if isinstance(segment, Segment)]
        live = {segment for segment, _ in self._live.values() if segment.node is not None}
        if set(segments) != set(self._segments) | set(self._long) | live:
            raise AssertionError("the tree has other segments than are counted")
        if set(self._running) != set(running):
            raise AssertionError("other requests hold window slots than run")
        if any(not segment.serves(segment.position) for segment in segments):
            raise AssertionError("a segment lacks slots")
        of_beams = [r.beams.held_windows() for r in running if r.beams is not None]
        held = [list(request.window_slots) for request in running] + [list(slots) for slots in of_beams]
        self._pool.check(held, [segment.slots for segment in segments])
