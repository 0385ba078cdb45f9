"""Orders the unreferenced leaves of the prefix tree for eviction."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from moeserve.router.core.memory.radix_node import Node

_STALE_SPARE = 1024  # the heap is rebuilt when its entries exceed twice the number of nodes by this many


def is_idle_leaf(node: Node) -> bool:
    """True for a leaf that no request references. Roots and evicted nodes have no slots and are no idle leaves."""
    return node.refs == 0 and not node.children and len(node.slots) > 0


class EvictionOrder:
    """A heap of idle leaves by (last_used, number). Using a leaf again leaves its old entry in the heap; outdated
    entries are skipped when they reach the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []

    def __len__(self) -> int:
        """Number of entries, outdated ones included."""
        return len(self._heap)

    def keys(self) -> set[tuple[int, int]]:
        """Returns (last_used, number) of every entry."""
        return {(last_used, number) for last_used, number, _ in self._heap}

    def add(self, node: Node, num_nodes: int) -> None:
        """Adds an idle leaf. num_nodes: the size of the tree."""
        heappush(self._heap, (node.last_used, node.number, node))
        if len(self._heap) > 2 * num_nodes + _STALE_SPARE:
            kept = {(tick, number): n for tick, number, n in self._heap if n.last_used == tick}
            self._heap = [(*key, n) for key, n in kept.items() if is_idle_leaf(n)]
            heapify(self._heap)

    def pop(self) -> Node | None:
        """Removes and returns the least recently used leaf; None if there is none."""
        while self._heap:
            last_used, _, node = heappop(self._heap)
            if node.last_used == last_used and is_idle_leaf(node):
                return node
        return None
