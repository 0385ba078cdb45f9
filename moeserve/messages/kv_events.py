"""KV events: messages to gateways about changes of the server's prefix cache, in vLLM's wire format.

A batch is one ZMQ message of three frames: a topic, a sequence number (8 bytes, big-endian) and msgpack of the array
[seconds of time.time(), events, data parallel rank]. An event is a map whose "type" is its name, or, as vLLM wrote it
before 2026, an array of its name and its fields.
Source: vLLM, `vllm/distributed/kv_events.py`, https://docs.vllm.ai/en/latest/api/vllm/distributed/kv_events/
"""

from __future__ import annotations

from typing import Final

import msgspec

# vLLM's name for the pool that running requests attend to. vLLM uses it for CPUs as well, because gateways rate blocks
# in other media lower.
MAIN_POOL: Final = "GPU"


class BlockStored(msgspec.Struct, tag=True):
    """Consecutive blocks of one prompt or answer are in the cache."""

    block_hashes: list[int]  # uint64, each of its block's tokens and all before them
    parent_block_hash: int | None  # of the block before the first; None: the first one begins the prompt
    token_ids: list[int]  # block_size of each block
    block_size: int
    lora_id: int | None = None
    medium: str | None = MAIN_POOL
    lora_name: str | None = None
    # For each block, what its hash depends on besides tokens: a prompt's first block has the namespace that may share
    # it; a block with positions of a span has the span's key in hexadecimal (`token_ids` has placeholders there).
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None = MAIN_POOL


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
RANK: Final = 0  # a server is one replica


def encode_batch(time: float, events: list[KvEvent], *, as_maps: bool) -> bytes:
    """Returns the third frame of a batch. time: seconds of time.time()."""
    written = (
        events if as_maps else [(type(event).__name__, *msgspec.structs.astuple(event)) for event in events]
    )
    return msgspec.msgpack.encode((time, written, RANK))
