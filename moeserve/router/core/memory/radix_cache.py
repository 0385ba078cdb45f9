"""The prefix cache: a radix tree from tokens to the KV slots that hold their keys and values.

The KV of a token depends only on it and the tokens before it, so requests with a common prefix can share slots. Each
node holds a run of tokens and one slot per token; the path from a root spells a prefix. This is SGLang's
RadixAttention (arXiv:2312.07104) at the granularity of single tokens.

- A node's `refs` counts the running requests whose shared prefix includes it. A node without references is idle. Idle
  slots stay cached and are evicted from the end of the least recently used leaf. A parent has at least as many
  references as each child, so all descendants of an idle node are idle.
- Each namespace has its own root; requests find only prefixes of their namespace.
- In models with recurrent state, a node may have a snapshot of the state after its last token. Requests continue from
  a snapshot, so a prefix is usable only up to the deepest one. A node whose end changes loses its snapshot.
- If windowed layers have their own KV pool, a node's snapshot may also serve positions inside the node
  (`window_memory.py`).
- An operation takes time proportional to the nodes on its path; tokens are compared and moved as blocks of memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from moeserve.router.core.memory.eviction_order import EvictionOrder, is_idle_leaf
from moeserve.router.core.memory.radix_node import TOKEN_BYTES, Namespace, Node, Snapshot, depth, walk

if TYPE_CHECKING:
    from moeserve.router.core.memory.block_log import BlockLog


class RadixCache:
    """The prefix tree. It takes ownership of slots in `extend` and `release`, and gives it up in `evict`, `discard` and
    with the slots that `release` returns. Tokens are int32 as bytes, slots are int32 arrays."""

    def __init__(self, *, recurrent: bool = False, log: BlockLog | None = None) -> None:
        """recurrent: whether prefixes are usable only up to a snapshot. log: is notified of all changes."""
        self._log = log
        self.num_tokens = 0
        self.num_idle = 0  # tokens in nodes without references
        self._recurrent = recurrent
        # called with the new upper node and the lower node's snapshot
        self.on_split: Callable[[Node, Snapshot], None] | None = None
        self._dropped: list[Snapshot] = []  # snapshots dropped since the last `take_dropped`
        self._roots: dict[Namespace, Node] = {}
        self._uses = 0  # a logical clock: incremented at each use
        self._num_nodes = 0
        self._idle = EvictionOrder()

    # ---------------------------------------------------------------- reading

    def match(self, namespace: Namespace, tokens: bytes) -> tuple[int, int]:
        """Returns the length of the longest prefix of `tokens` that `acquire` would find, and the number of idle
        tokens in it. Changes nothing."""
        matched = idle = 0
        for node, common in self._usable(self._roots.get(namespace), tokens):
            matched += common
            if node.refs == 0:
                idle += common
        return matched, idle

    def num_matched(self, namespace: Namespace, tokens: bytes) -> int:
        """Returns the length of the longest prefix of `tokens` with cached KV, whether or not a snapshot makes it
        usable."""
        root = self._roots.get(namespace)
        return 0 if root is None else sum(common for _, common in walk(root, tokens))

    def cached_slots(self, namespace: Namespace, tokens: bytes) -> array[int]:
        """Returns the slots of the longest prefix of `tokens` with cached KV. The tree keeps ownership."""
        slots = array("i")
        root = self._roots.get(namespace)
        if root is not None:
            for node, common in walk(root, tokens):
                slots.extend(node.slots[:common])
        return slots

    def _usable(self, root: Node | None, tokens: bytes) -> list[tuple[Node, int]]:
        """Returns the part of `walk` that a request can use."""
        path = [] if root is None else list(walk(root, tokens))
        if self._recurrent:
            position = sum(common for _, common in path)
            while path and not _serves(path[-1][0], position):
                position -= path.pop()[1]
        return path

    # ---------------------------------------------------------------- references

    def acquire(self, namespace: Namespace, tokens: bytes) -> tuple[Node, array[int]]:
        """References the longest usable prefix of `tokens`. Returns its last node and its slots. The caller ends the
        reference with `release` or `discard`."""
        root = self._root(namespace)
        return self._acquire(root, self._usable(root, tokens))

    def acquire_kv(self, namespace: Namespace, tokens: bytes) -> Node:
        """References the longest prefix, whatever its snapshots; returns its last node. Not to compute from it."""
        root = self._root(namespace)
        return self._acquire(root, list(walk(root, tokens)))[0]

    def _root(self, namespace: Namespace) -> Node:
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = self._new_node(None, namespace, bytearray(), array("i"))
        return node

    def _acquire(self, node: Node, path: list[tuple[Node, int]]) -> tuple[Node, array[int]]:
        slots = array("i")
        for child, common in path:
            node = child if common == len(child.slots) else self._split(child, common)
            slots.extend(node.slots)
        self._hold(node)
        return node, slots

    def extend(self, node: Node, tokens: bytes, slots: array[int]) -> Node | None:
        """Moves the slots of `tokens` into the tree, after `node`, which the caller references. The reference moves
        to the returned node. Returns None if the tree already has a continuation with the same first token; the
        caller then keeps the slots."""
        if node.children.get(tokens[:TOKEN_BYTES]) is not None:
            return None
        self.num_tokens += len(slots)
        if node.refs == 1 and self._may_grow(node):
            node.tokens += tokens  # allowed because no other request references it
            node.slots.extend(slots)
            if self._log is not None:
                self._log.grown(node)
            return node
        child = self._add_child(node, tokens, slots)
        child.refs = 1
        return child

    def adopt(self, node: Node, tokens: bytes, slots: array[int]) -> tuple[Node, array[int]] | None:
        """Moves the slots of `tokens` into the tree, after `node`; it may already have the first of them, or all. Nodes
        that exist already get the new slots. Returns the last node and the old slots, which the caller must free; None
        if another request references such a node: the caller then keeps the slots."""
        path = list(walk(node, tokens))
        if any(child.refs for child, _ in path):
            return None
        freed = array("i")
        at = 0
        for child, common in path:
            node = child if common == len(child.slots) else self._split(child, common)
            freed.extend(node.slots)
            node.slots = slots[at : at + common]
            node.refs = 1
            self.num_idle -= common
            at += common
        if at < len(slots):
            extended = self.extend(node, tokens[at * TOKEN_BYTES :], slots[at:])
            assert extended is not None  # the walk covered all other tokens
            node = extended
        return node, freed

    def release(self, node: Node, tokens: bytes, slots: array[int]) -> tuple[array[int], Node]:
        """Ends a reference to `node`. `tokens` follow `node`, with their KV in `slots`: the tree takes the slots of
        the tokens that it lacks. Returns the other slots, for the caller to free, and the node at which `tokens`
        end."""
        surplus, end = self._insert(node, tokens, slots)
        self._uses += 1
        current: Node | None = node
        while current is not None:
            current.refs -= 1
            if current.refs == 0:
                self.num_idle += len(current.slots)
            current = current.parent
        current = end
        while current is not None:
            current.last_used = self._uses
            current = current.parent
        self._note_leaf(end)
        self._drop_empty_root(end)
        return surplus, end

    def discard(self, node: Node) -> array[int]:
        """Ends a reference to `node`. Removes `node` if it then has no reference and no child, and likewise its parent,
        and so on. Returns their slots, for the caller to free."""
        self.release(node, b"", array("i"))
        freed = array("i")
        while node.parent is not None and node.refs == 0 and not node.children:
            parent = node.parent
            freed.extend(node.slots)
            self._remove_leaf(node)
            node = parent
        self._note_leaf(node)
        return freed

    def _insert(self, node: Node, tokens: bytes, slots: array[int]) -> tuple[array[int], Node]:
        """Adds `tokens` below `node` as an idle path. Returns the slots of tokens that existed already, and the last
        node."""
        surplus = array("i")
        at, start = 0, node
        for child, common in list(walk(node, tokens)):
            surplus.extend(slots[at : at + common])
            at += common
            node = child if common == len(child.slots) else self._split(child, common)
        if at == len(slots):
            return surplus, node
        rest, rest_tokens = slots[at:], tokens[at * TOKEN_BYTES :]
        self.num_tokens += len(rest)
        is_unshared = node.refs == 0 or (node is start and node.refs == 1)
        if is_unshared and self._may_grow(node):
            # `release` then ends the caller's reference, and the node becomes idle as a whole.
            node.tokens += rest_tokens
            node.slots.extend(rest)
            if node.refs == 0:
                self.num_idle += len(rest)
            if self._log is not None:
                self._log.grown(node)
            return surplus, node
        self.num_idle += len(rest)
        return surplus, self._add_child(node, rest_tokens, rest)

    @staticmethod
    def _may_grow(node: Node) -> bool:
        """Returns whether tokens may be appended to `node` itself instead of to a new child."""
        return not node.children and node.parent is not None and node.snapshot is None

    # ---------------------------------------------------------------- snapshots

    def node_at(self, node: Node, tokens: bytes) -> Node | None:
        """Returns the node at which `tokens` below `node` end, after splitting one if necessary; None if the tree
        lacks some."""
        at = 0
        for child, common in list(walk(node, tokens)):
            node = child if common == len(child.slots) else self._split(child, common)
            at += common * TOKEN_BYTES
        return node if at == len(tokens) else None

    def set_snapshot(self, node: Node, snapshot: Snapshot) -> None:
        """Attaches a snapshot of the state after the last token of `node`, which must have none and be no root."""
        assert node.snapshot is None
        assert node.parent is not None
        node.snapshot, snapshot.node = snapshot, node

    def unset_snapshot(self, snapshot: Snapshot) -> None:
        """Detaches a snapshot from its node."""
        assert snapshot.node is not None
        snapshot.node.snapshot = None
        snapshot.node = None

    def take_dropped(self) -> list[Snapshot]:
        """Returns the snapshots that lost their nodes since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def snapshots_of(self, namespace: Namespace, tokens: bytes) -> list[Snapshot]:
        """Returns the snapshots on the path of `tokens`, shortest prefix first. The tree keeps ownership."""
        root = self._roots.get(namespace)
        path = [] if root is None else walk(root, tokens)
        ends = (node for node, common in path if common == len(node.slots))
        return [node.snapshot for node in ends if node.snapshot is not None]

    def _drop_snapshot(self, node: Node) -> None:
        if node.snapshot is not None:
            self._dropped.append(node.snapshot)
            self.unset_snapshot(node.snapshot)

    # ---------------------------------------------------------------- eviction

    def evict(self, count: int) -> array[int]:
        """Evicts up to `count` idle tokens, least recently used first. Returns their slots, for the caller to free."""
        freed = array("i")
        while len(freed) < count and (node := self._idle.pop()) is not None:
            take = min(len(node.slots), count - len(freed))
            freed.extend(node.slots[-take:])
            if take < len(node.slots):
                self._drop_snapshot(node)
                del node.slots[-take:]
                del node.tokens[-take * TOKEN_BYTES :]
                self.num_tokens -= take
                self.num_idle -= take
                if self._log is not None:
                    self._log.shrunk(node)
                self._note_leaf(node)
            else:
                parent = node.parent
                self._remove_leaf(node)
                assert parent is not None  # a root is never a leaf
                self._note_leaf(parent)
        return freed

    def _note_leaf(self, node: Node) -> None:
        """Queues `node` for eviction if it is an idle leaf."""
        if is_idle_leaf(node):
            self._idle.add(node, self._num_nodes)

    # ---------------------------------------------------------------- nodes

    def _new_node(
        self, parent: Node | None, namespace: Namespace, tokens: bytearray, slots: array[int]
    ) -> Node:
        self._uses += 1
        self._num_nodes += 1
        return Node(self._uses, parent, namespace, tokens, slots)

    def _add_child(self, node: Node, tokens: bytes, slots: array[int]) -> Node:
        child = self._new_node(node, node.namespace, bytearray(tokens), slots[:])
        node.children[tokens[:TOKEN_BYTES]] = child
        if self._log is not None:
            self._log.grown(child)
        return child

    def _split(self, node: Node, count: int) -> Node:
        """Splits `node` after `count` tokens. Returns the new parent, which holds the first `count`. References to
        `node` stay valid, because its end does not move."""
        parent = node.parent
        assert parent is not None
        at = count * TOKEN_BYTES
        upper = self._new_node(parent, node.namespace, node.tokens[:at], node.slots[:count])
        upper.refs, upper.last_used = node.refs, node.last_used
        parent.children[bytes(upper.tokens[:TOKEN_BYTES])] = upper
        node.parent = upper
        del node.tokens[:at]
        del node.slots[:count]
        upper.children[bytes(node.tokens[:TOKEN_BYTES])] = node
        if self._log is not None:
            self._log.split(upper, node)
        if node.snapshot is not None and self.on_split is not None:
            self.on_split(upper, node.snapshot)
        return upper

    def _hold(self, node: Node) -> None:
        self._uses += 1
        current: Node | None = node
        while current is not None:
            if current.refs == 0:
                self.num_idle -= len(current.slots)
            current.refs += 1
            current.last_used = self._uses
            current = current.parent

    def _remove_leaf(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        self._drop_snapshot(node)
        if self._log is not None:
            self._log.removed(node)
        del parent.children[bytes(node.tokens[:TOKEN_BYTES])]
        self.num_tokens -= len(node.slots)
        self.num_idle -= len(node.slots)
        self._num_nodes -= 1
        # new objects, as a caller may be iterating over the old ones
        node.slots, node.tokens = array("i"), bytearray()
        self._drop_empty_root(parent)

    def _drop_empty_root(self, node: Node) -> None:
        """Removes the root of a namespace if it has neither references nor children."""
        if node.parent is None and node.refs == 0 and not node.children:
            del self._roots[node.namespace]
            self._num_nodes -= 1

    # ---------------------------------------------------------------- invariants

    def snapshots(self) -> Iterator[Snapshot]:
        """Yields the snapshot of every node that has one."""
        for node in self.nodes():
            if node.snapshot is not None:
                yield node.snapshot

    def check(self) -> None:
        """Raises AssertionError if a count or link is wrong, or an idle leaf is missing in the heap. O(tokens)."""
        nodes = list(self.nodes())
        queued = self._idle.keys()
        invariants = {
            "tokens": self.num_tokens == sum(len(node.slots) for node in nodes),
            "idle tokens": self.num_idle == sum(len(node.slots) for node in nodes if node.refs == 0),
            "nodes": self._num_nodes == len(nodes),
            "one slot for each token": all(len(n.tokens) == TOKEN_BYTES * len(n.slots) for n in nodes),
            "only roots are empty": all((len(n.slots) == 0) == (n.parent is None) for n in nodes),
            "no root without references or children": all(
                n.children or n.refs for n in nodes if n.parent is None
            ),
            "refs do not decrease towards the root": all(
                n.parent is None or n.parent.refs >= n.refs for n in nodes
            ),
            "idle leaves are in the heap": all(
                (n.last_used, n.number) in queued for n in nodes if is_idle_leaf(n)
            ),
            "snapshots are of their node's end": all(
                n.snapshot.node is n and n.snapshot.position == depth(n)
                for n in nodes
                if n.snapshot is not None
            ),
            "children by first token": all(
                child.parent is n and bytes(child.tokens[:TOKEN_BYTES]) == key
                for n in nodes
                for key, child in n.children.items()
            ),
        }
        broken = [name for name, holds in invariants.items() if not holds]
        if broken:
            raise AssertionError(f"the prefix tree is broken: {broken}")

    def nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _serves(node: Node, position: int) -> bool:
    return node.snapshot is not None and node.snapshot.serves(position)
