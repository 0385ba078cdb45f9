"""Logs the blocks of tokens that enter and leave the prefix tree, as KV events for gateways.

The tree works with single tokens, gateways with blocks of fixed size. Block i of a path from a root covers the
tokens [i * size, (i + 1) * size). It counts as stored while the tree holds the whole path up to its end. Tokens
after the last complete block appear in no event.

    node              A (5 tokens)    B (6 tokens)          size 4
    tokens            a a a a|a       b b b|b b b           path A, B: 2 complete blocks, 3 tokens without one
    its blocks        0               1                     a block belongs to the node that has its last token
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from moeserve.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from moeserve.router.core.memory.embedding_numbers import EmbeddingNumbers
from moeserve.router.core.memory.radix_node import TOKEN_BYTES, Namespace, Node

HASH_BYTES = 8  # uint64, like vLLM's


@dataclass(slots=True)
class _Run:
    """The log's record of a node."""

    start: int  # number of tokens on the path before the node
    hashes: list[int] = field(default_factory=list)  # hashes of the node's blocks, in order


class BlockLog:
    """Receives every change of a node's end from one `RadixCache`, except for roots, which have no tokens."""

    def __init__(self, block_size: int, spans: EmbeddingNumbers) -> None:
        """block_size: number of tokens in a block."""
        self._size = block_size
        self._spans = spans
        self._runs: dict[Node, _Run] = {}
        self._events: list[KvEvent] = []

    def take(self) -> list[KvEvent]:
        """Returns the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def grown(self, node: Node) -> None:
        """Notes that `node` is new or has grown at its end."""
        run = self._runs.get(node)
        if run is None:
            run = self._runs[node] = _Run(self._end(node.parent))
        first = run.start // self._size + len(run.hashes)
        last = (run.start + len(node.slots)) // self._size
        if first == last:
            return
        parent = run.hashes[-1] if run.hashes else self._hash_before(node)
        tokens = self._tokens(node, first * self._size - run.start, last * self._size - run.start)
        self._store(node.namespace, parent, tokens, run.hashes)

    def shrunk(self, node: Node) -> None:
        """Notes that some, but not all, tokens were removed from the end of `node`."""
        run = self._runs[node]
        kept = (run.start + len(node.slots)) // self._size - run.start // self._size
        self._remove(run.hashes[kept:])
        del run.hashes[kept:]

    def removed(self, node: Node) -> None:
        """Notes that `node` was removed from the tree."""
        self._remove(self._runs.pop(node).hashes)

    def split(self, upper: Node, lower: Node) -> None:
        """Notes that the first tokens of `lower` became the new node `upper`. The tree's blocks stay the same."""
        run = self._runs[lower]
        border = run.start + len(upper.slots)
        count = border // self._size - run.start // self._size
        self._runs[upper] = _Run(run.start, run.hashes[:count])
        run.start = border
        del run.hashes[:count]

    def cleared(self) -> None:
        """Notes, after `removed` for each node, that the tree is empty. Emits a single event for that."""
        self._events = [AllBlocksCleared()]

    # ---------------------------------------------------------------- blocks

    def _end(self, node: Node | None) -> int:
        """Returns the number of tokens on the path up to the end of `node`."""
        run = None if node is None else self._runs.get(node)
        return 0 if node is None or run is None else run.start + len(node.slots)

    def _hash_before(self, node: Node) -> int | None:
        """Returns the hash of the last block that ends before `node`; None if there is none."""
        above = node.parent
        while above is not None:
            run = self._runs.get(above)
            if run is not None and run.hashes:
                return run.hashes[-1]
            above = above.parent
        return None

    @staticmethod
    def _tokens(node: Node, begin: int, end: int) -> bytes:
        """Returns the path's tokens from `begin` to `end`, counted from the start of `node`. A negative `begin`
        reaches into the nodes above."""
        parts: list[bytes | bytearray] = [node.tokens[max(begin, 0) * TOKEN_BYTES : end * TOKEN_BYTES]]
        above = node.parent
        while begin < 0:
            assert above is not None  # the path starts at 0
            held = len(above.slots)
            parts.append(above.tokens[max(held + begin, 0) * TOKEN_BYTES :])
            begin, above = begin + held, above.parent
        return b"".join(reversed(parts))

    def _store(self, namespace: Namespace, parent: int | None, tokens: bytes, hashes: list[int]) -> None:
        """Logs the blocks of `tokens` as stored, and appends their hashes to `hashes`."""
        stride = self._size * TOKEN_BYTES
        of_namespace = _extra_keys(namespace) if parent is None else ()
        last = parent
        new: list[int] = []
        extra: list[tuple[str, ...] | None] = []
        for at in range(0, len(tokens), stride):
            block = tokens[at : at + stride]
            last = block_hash(namespace, last, self._spans.content(block))
            new.append(last)
            extra.append((*of_namespace, *(key.hex() for key in self._spans.keys_in(block))) or None)
            of_namespace = ()
        hashes.extend(new)
        ids, keys = self._spans.shown(tokens), extra if any(extra) else None
        self._events.append(BlockStored(new, parent, ids, self._size, extra_keys=keys))

    def _remove(self, hashes: list[int]) -> None:
        if not hashes:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.extend(hashes)
        else:
            self._events.append(BlockRemoved(list(hashes)))


def block_hash(namespace: Namespace, parent: int | None, tokens: bytes) -> int:
    """Returns a block's hash, equal on all servers. It covers the block's int32 tokens (`EmbeddingNumbers.content`),
    all tokens before them by way of `parent`, and the namespace, so that equal prompts that must not share KV have
    different hashes."""
    seed = repr(namespace).encode() if parent is None else parent.to_bytes(HASH_BYTES, "little")
    digest = blake2b(tokens, digest_size=HASH_BYTES, key=blake2b(seed, digest_size=32).digest())
    return int.from_bytes(digest.digest(), "little")


def _extra_keys(namespace: Namespace) -> tuple[str, ...]:
    """Returns the "extra keys" (vLLM's term) of a prompt's first block: the adapter, the API key's name and the
    salt, each only if set."""
    tenant, salt, *adapter = namespace
    return (
        *(f"lora:{key}" for key in adapter),
        *((f"key:{tenant}",) if tenant else ()),
        *((salt,) if salt else ()),
    )
