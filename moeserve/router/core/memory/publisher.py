"""Moves running requests' slots into the prefix tree, so that other requests can share them at once."""

from __future__ import annotations

from moeserve.router.core.memory.held import HeldSequence
from moeserve.router.core.memory.radix_cache import RadixCache
from moeserve.router.core.memory.radix_node import Node, SnapshotKind
from moeserve.router.core.memory.token_pool import TokenPool
from moeserve.router.core.memory.window_memory import WindowMemory


class Publisher:
    """Moves slots of running requests into the prefix tree. Only this class and `KvMemory` write a request's `node`
    and `num_shared`."""

    def __init__(
        self, tree: RadixCache, pool: TokenPool, windows: WindowMemory | None, *, exchanges: bool
    ) -> None:
        """exchanges: whether a request may recompute tokens whose KV the tree already has, after a snapshot; its slots
        then replace the tree's."""
        self._tree = tree
        self._pool = pool
        self._windows = windows
        self._exchanges = exchanges

    def publish(self, request: HeldSequence, end: int) -> None:
        """Moves the slots of a request's tokens before position `end` into the tree; they must be known and planned."""
        if self._windows is None:
            self._up_to(request, end)
        else:
            self._with_windows(request, end, self._windows)

    def _with_windows(self, request: HeldSequence, end: int, windows: WindowMemory) -> None:
        """Moves the slots into the tree, as `publish` does, and creates a window segment at each snapshot point on the
        way."""
        stays = end - windows.window + 1 if end == request.target else None
        for point in windows.passed_points(request, end):
            position, kind = point
            if kind is SnapshotKind.PROMPT and end - position < windows.window:
                # start of the segment that remains when the chunk's is shortened
                stays = position - windows.window + 1
            elif position == end:
                stays = end - windows.window + 1
            else:
                self._up_to(request, position)
                windows.keep_segment_at(request, self._node_at(request, position), point)
        self._up_to(request, end)
        windows.keep_chunk(request, self._node_at(request, end), end, stays)
        windows.reclaim()

    def _node_at(self, request: HeldSequence, position: int) -> Node | None:
        """Returns the node that ends after the first `position` tokens of a request, or None; another request may
        have computed its KV."""
        assert request.node is not None
        return self._tree.node_at(request.node, request.tokens[request.num_shared : position].tobytes())

    def _up_to(self, request: HeldSequence, end: int) -> None:
        assert request.node is not None
        begin = request.num_shared
        if begin == end:
            return
        node = self._tree.extend(request.node, request.tokens[begin:end].tobytes(), request.slots[begin:end])
        if node is not None:
            request.node, request.num_shared = node, end
        elif self._exchanges:
            self._exchange(request, end)

    def _exchange(self, request: HeldSequence, end: int) -> None:
        """Replaces the tree's slots for tokens before `end` by the request's private ones."""
        assert request.node is not None
        begin = request.num_shared
        tokens, slots = request.tokens[begin:end].tobytes(), request.slots[begin:end]
        adopted = self._tree.adopt(request.node, tokens, slots)
        if adopted is not None:
            request.node, freed = adopted
            request.num_shared = end
            self._pool.free(freed)
