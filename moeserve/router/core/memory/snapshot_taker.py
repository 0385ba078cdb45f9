"""Takes snapshots of running prompts: keeps their snapshot points and copies the state when one is reached.

A row of plan N that ends at a point leaves the state there until the request's next row. So the copy must be part of
plan N+1, before its rows: `planned` notes the requests that reached a point, and `take` is called when the next plan
is started.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from moeserve.router.core.memory.held import HeldSequence
from moeserve.router.core.memory.radix_cache import RadixCache
from moeserve.router.core.memory.radix_node import SnapshotKind, common_tokens
from moeserve.router.core.memory.snapshot_points import SnapshotSpacing, snapshot_points
from moeserve.router.core.memory.state_memory import StateMemory


def by_position(point: tuple[int, SnapshotKind]) -> int:
    return point[0]


class SnapshotTaker:
    """Takes snapshots of running prompts at their snapshot points. The only writer of a request's
    `snapshot_points`."""

    def __init__(self, tree: RadixCache, states: StateMemory, spacing: SnapshotSpacing) -> None:
        self._tree = tree
        self._states = states
        self._spacing = spacing
        self._due: dict[
            HeldSequence, SnapshotKind
        ] = {}  # requests whose last planned row ends at a snapshot point

    def bound(self, request: HeldSequence, num_matched: int) -> None:
        """Chooses the points of a newly bound request; the tree has the KV of its first `num_matched` tokens."""
        start = len(request.slots)
        source = None if request.node is None else request.node.snapshot
        request.snapshot_points = snapshot_points(
            start,
            num_matched,
            request.num_prompt,
            self._spacing,
            follows_prompt=source is not None
            and source.position == start
            and source.kind is SnapshotKind.PROMPT,
        )

    def planned(self, request: HeldSequence) -> None:
        """Notes a chunk that was planned and published."""
        if request.snapshot_points and request.snapshot_points[0][0] == len(request.slots):
            self._due[request] = request.snapshot_points.pop(0)[1]

    def left(self, request: HeldSequence) -> None:
        """Forgets a request that leaves; its own state is kept elsewhere."""
        self._due.pop(request, None)
        request.snapshot_points = []

    def take(self) -> None:
        """Copies the due states in the plan being started. No snapshot is taken if no tree node ends at the point,
        because another running request holds the slots of the same tokens."""
        for request, kind in self._due.items():
            rest = request.tokens[request.num_shared : len(request.slots)].tobytes()
            assert request.node is not None
            node = self._tree.node_at(request.node, rest)
            if node is not None and node.snapshot is None:
                self._states.take(request, node, kind)
        self._due.clear()

    def ask(self, tokens: bytes, num_found: int, prompts: Iterable[HeldSequence]) -> bool:
        """Returns whether one of the running `prompts` will leave a snapshot on the path of `tokens` that is worth
        waiting for. That prompt gets a point where it diverges from `tokens`, unless it is past it. num_found:
        tokens that present snapshots cover."""
        most, best = num_found + self._spacing.least - 1, None
        for prompt in prompts:
            common = self._common(tokens, prompt)
            if common > most and self._will_leave(prompt, common):
                most, best = common, prompt
        if best is None:
            return False
        if not self._has_point(best, most):
            insort(best.snapshot_points, (most, SnapshotKind.BRANCH), key=by_position)
        return True

    def _will_leave(self, prompt: HeldSequence, position: int) -> bool:
        """Returns whether a running prompt has, or can still get, a snapshot point at `position` or shortly before."""
        return position > len(prompt.slots) or self._has_point(prompt, position)

    def _has_point(self, prompt: HeldSequence, position: int) -> bool:
        points = [at for at, _ in prompt.snapshot_points]
        if prompt in self._due:
            points.append(len(prompt.slots))
        return any(0 <= position - at < self._spacing.least for at in points)

    def _common(self, tokens: bytes, prompt: HeldSequence) -> int:
        """Returns the number of tokens that a prompt's prefill shares with `tokens`; 0 if too few to matter."""
        head = prompt.tokens[: self._spacing.least].tobytes()
        if tokens[: len(head)] != head:  # true for most prompts
            return 0
        return common_tokens(tokens, 0, prompt.tokens[: prompt.target].tobytes())
