"""Nodes of the prefix tree, the snapshots of recurrent state at their ends, and read-only functions on them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import Enum, auto

TOKEN_BYTES = 4
# API key's name, salt and, with a LoRA adapter, its key.
Namespace = tuple[str, str] | tuple[str, str, str]


class SnapshotKind(Enum):
    """The reason why a snapshot was taken; `snapshot_points.py` chooses the positions within a prompt."""

    PROMPT = auto()  # near the end of a prompt
    BRANCH = auto()  # where a prompt diverges from an earlier one with the same beginning
    SPACED = auto()  # at intervals in a long prompt
    ANSWER = auto()  # where a request ended
    PREEMPTED = auto()  # where a request was preempted


class Snapshot:
    """The recurrent state after the first `position` tokens of a sequence, stored in state slot `slot`."""

    __slots__ = ("kind", "node", "number", "position", "slot", "touched")

    def __init__(self, slot: int, position: int, kind: SnapshotKind) -> None:
        self.slot = slot
        self.position = position
        self.kind = kind
        # the node at whose end it is; None outside the tree; written by RadixCache
        self.node: Node | None = None
        self.number = 0  # order of use; written by SnapshotCache, like `touched`
        self.touched = 0.0  # SnapshotCache's clock when it was taken or last used

    def serves(self, position: int) -> bool:
        """Returns whether a request can continue at `position` of the node's path."""
        return position == self.position

    @property
    def gain(self) -> int:
        """Number of tokens that requests would have to recompute without this snapshot: the distance to the next
        snapshot towards the root."""
        node = None if self.node is None else self.node.parent
        while node is not None:
            if node.snapshot is not None:
                return self.position - node.snapshot.position
            node = node.parent
        return self.position


class Node:
    """A node, owned and changed by one `RadixCache`; for other modules an opaque position in the tree."""

    __slots__ = (
        "children",
        "last_used",
        "namespace",
        "number",
        "parent",
        "refs",
        "slots",
        "snapshot",
        "tokens",
    )

    def __init__(
        self, number: int, parent: Node | None, namespace: Namespace, tokens: bytearray, slots: array[int]
    ) -> None:
        self.number = number  # order of creation; breaks ties of last_used
        self.parent = parent  # None for a root
        self.namespace = namespace
        self.tokens = tokens  # int32 [n], as bytes
        self.slots = slots  # [n]
        self.children: dict[bytes, Node] = {}  # first token's bytes → child
        self.refs = 0
        self.last_used = 0
        self.snapshot: Snapshot | None = None  # the state after the last token


def depth(node: Node) -> int:
    """Returns the number of tokens from the root to the end of `node`."""
    depth, current = 0, node
    while current.parent is not None:
        depth += len(current.slots)
        current = current.parent
    return depth


def common_tokens(tokens: bytes, at: int, stretch: bytes | bytearray) -> int:
    """Returns the number of leading tokens that `tokens[at:]` and `stretch` share. Binary search over blocks of
    memory: a mismatch costs at most two passes."""
    end = min(len(tokens) - at, len(stretch))
    if tokens[at : at + end] == stretch[:end]:
        return end // TOKEN_BYTES
    low, high = 0, end // TOKEN_BYTES  # equal up to `low`, different before `high`
    while high - low > 1:
        middle = (low + high) // 2
        begin, stop = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if tokens[at + begin : at + stop] == stretch[begin:stop]:
            low = middle
        else:
            high = middle
    return low


def walk(node: Node, tokens: bytes) -> Iterator[tuple[Node, int]]:
    """Yields the nodes below `node` that spell a prefix of `tokens`, each with the number of its matching tokens."""
    at, end = 0, len(tokens)
    while at < end:
        child = node.children.get(tokens[at : at + TOKEN_BYTES])
        if child is None:
            return
        common = common_tokens(tokens, at, child.tokens)
        yield child, common
        if common < len(child.slots):
            return
        node = child
        at += common * TOKEN_BYTES
