"""A node of the prefix tree, the snapshot of recurrent state at its end, and what is read off them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import Enum, auto

TOKEN_BYTES = 4
# The name of an API key, a salt and, of an adapter, its key.
Namespace = tuple[str, str] | tuple[str, str, str]


class SnapshotKind(Enum):
    """Why a snapshot was taken; `snapshot_points.py` has the positions of those within a prompt."""

    PROMPT = auto()  # near the end of a prompt
    BRANCH = auto()  # where a prompt departs from another that began like it
    SPACED = auto()  # earlier in a long prompt
    ANSWER = auto()  # where a request ended
    PREEMPTED = auto()  # where a request was preempted


class Snapshot:
    """The state after the first `position` tokens of a sequence, in state slot `slot`."""

    __slots__ = ("kind", "node", "number", "position", "slot", "touched")

    def __init__(self, slot: int, position: int, kind: SnapshotKind) -> None:
        self.slot = slot
        self.position = position
        self.kind = kind
        self.node: Node | None = None  # whose end it belongs to; written by RadixCache, None outside the tree
        self.number = 0  # in order of use; with `touched` written by SnapshotCache
        self.touched = 0.0  # the clock when it was taken or last used

    def serves(self, position: int) -> bool:
        """Whether a request can continue at `position` of the node's path."""
        return position == self.position

    @property
    def gain(self) -> int:
        """Tokens that are computed again without it: from the next snapshot towards the root."""
        node = None if self.node is None else self.node.parent
        while node is not None:
            if node.snapshot is not None:
                return self.position - node.snapshot.position
            node = node.parent
        return self.position


class Node:
    """Owned and changed by one `RadixCache`; to others it is an opaque handle of a position in the tree."""

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
        self.number = number  # in order of creation: breaks ties of last_used
        self.parent = parent  # None: a root
        self.namespace = namespace
        self.tokens = tokens  # int32 [n], as bytes
        self.slots = slots  # [n]
        self.children: dict[bytes, Node] = {}  # by the bytes of their first token
        self.refs = 0
        self.last_used = 0
        self.snapshot: Snapshot | None = None  # of the state after the last token


def depth(node: Node) -> int:
    """The number of tokens from the root to the end of `node`."""
    depth, current = 0, node
    while current.parent is not None:
        depth += len(current.slots)
        current = current.parent
    return depth


def common_tokens(tokens: bytes, at: int, stretch: bytes | bytearray) -> int:
    """The number of leading tokens that `tokens[at:]` and `stretch` have in common. Binary search over blocks, so that
    a mismatch takes at most two passes over the memory."""
    end = min(len(tokens) - at, len(stretch))
    if tokens[at : at + end] == stretch[:end]:
        return end // TOKEN_BYTES
    low, high = 0, end // TOKEN_BYTES  # equal up to low, not up to high
    while high - low > 1:
        middle = (low + high) // 2
        begin, stop = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if tokens[at + begin : at + stop] == stretch[begin:stop]:
            low = middle
        else:
            high = middle
    return low


def walk(node: Node, tokens: bytes) -> Iterator[tuple[Node, int]]:
    """The nodes below `node` that spell a prefix of `tokens`, each with how many of its tokens match."""
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
