"""A node of the prefix tree, and what is read off one."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeserve.router.core.snapshots import Snapshot

TOKEN_BYTES = 4
# The name of an API key, a salt and, of an adapter, its key.
Namespace = tuple[str, str] | tuple[str, str, str]


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
