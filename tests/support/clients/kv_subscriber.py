"""A gateway's view of KV events: a decoder of vLLM's published schema, and the blocks that its events add up to.

Written from the schema alone, with no part of the publisher: vLLM, `vllm/distributed/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    *("lora_id", "medium", "lora_name", "extra_keys"),
)
REMOVED = ("block_hashes", "medium")
FIELDS = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}


def decode(payload: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a batch, maps or arrays: names and fields."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(ts, float)
    assert rank == 0
    for event in events:
        if isinstance(event, dict):
            name = event.pop("type")
            assert tuple(event) == FIELDS[name]
            yield name, event
        else:
            name, *values = event
            yield name, dict(zip(FIELDS[name], values, strict=True))


@dataclass
class Block:
    parent: int | None
    token_ids: tuple[int, ...]
    extra_keys: tuple[str, ...]


@dataclass
class Subscriber:
    """Applies batches, and asserts that each makes sense after those before it."""

    blocks: dict[int, Block] = field(default_factory=dict)  # by their hashes

    def apply(self, payload: bytes) -> None:
        for name, event in decode(payload):
            match name:
                case "BlockStored":
                    self._stored(**event)
                case "BlockRemoved":
                    self._removed(**event)
                case "AllBlocksCleared":
                    self.blocks.clear()

    def _stored(
        self,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: int | None,
        medium: str,
        lora_name: str | None,
        extra_keys: list[list[str] | None] | None,
    ) -> None:
        assert (lora_id, medium, lora_name) == (None, "GPU", None)
        assert len(token_ids) == block_size * len(block_hashes) > 0
        keys = extra_keys or [None] * len(block_hashes)
        assert len(keys) == len(block_hashes)
        parent = parent_block_hash
        for number, (hash, extra) in enumerate(zip(block_hashes, keys, strict=True)):
            assert parent is None or parent in self.blocks, "a block whose parent was not told of"
            assert hash not in self.blocks, "a block is stored twice"
            assert 0 <= hash < 1 << 64
            tokens = tuple(token_ids[number * block_size : (number + 1) * block_size])
            self.blocks[hash] = Block(parent, tokens, tuple(extra or ()))
            parent = hash

    def _removed(self, block_hashes: list[int], medium: str) -> None:
        assert medium == "GPU"
        for hash in block_hashes:
            del self.blocks[hash]

    def prefixes(self) -> set[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Each block as the extra keys of its path and all tokens up to its end."""
        return {self._path(hash) for hash in self.blocks}

    def _path(self, hash: int | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
        if hash is None:
            return (), ()
        block = self.blocks[hash]
        extra, tokens = self._path(block.parent)
        return extra + block.extra_keys, tokens + block.token_ids
