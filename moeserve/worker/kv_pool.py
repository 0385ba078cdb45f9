"""The KV pool's tensors and its size. The router owns the slots; this only holds what they index."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kernels.cpu_stream import KvLayer
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.placement.sizes import KV_BYTES_PER_VALUE
from moeserve.units import GIB

# The share of the memory left after the weights that the pool takes where the user does not say: the rest is for
# the page cache, the other processes and whatever else runs on the machine.
SHARE_OF_FREE_MEMORY = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvRoom:
    """Memory for the KV of some layers. A token has a slot in all layers, so the tightest room counts."""

    kind: str  # "memory" or "GPU memory", for messages
    free_bytes: int  # after the weights and, on a GPU, the steps' buffers
    num_layers: int
    share: float = 1.0  # that the pool takes by itself

    def tokens(self, model: Qwen3MoeConfig, share: float = 1.0) -> int:
        return max(0, int(self.free_bytes * share) // bytes_per_token(model, self.num_layers))


def bytes_per_token(model: Qwen3MoeConfig, num_layers: int | None = None) -> int:
    """In so many layers; None: all."""
    layers = model.num_layers if num_layers is None else num_layers
    return layers * 2 * model.num_kv_heads * model.head_dim * KV_BYTES_PER_VALUE


@dataclass(frozen=True, slots=True)
class Capacity:
    num_slots: int
    max_model_len: int


def plan_capacity(config: ServerConfig, model: Qwen3MoeConfig, rooms: Sequence[KvRoom]) -> Capacity:
    """How many tokens' KV the pool holds and how long a request may be. rooms: of all layers together; a room has at
    least one.

    Raises ConfigError where what the user asked for does not fit, with what would.
    """
    wanted_len = config.max_model_len or model.context_length
    room = min(rooms, key=lambda room: room.tokens(model, room.share))
    free = room.free_bytes / GIB
    if config.max_total_tokens is not None:
        slots = config.max_total_tokens
        for each in rooms:
            _check_total(slots, each, model)
    else:
        slots = min(config.max_num_seqs * wanted_len, room.tokens(model, room.share))
    if slots < min(wanted_len, 64):
        raise ConfigError(
            f"only {free:.2f} GiB of {room.kind} are free after the weights, room for "
            f"{room.tokens(model, room.share)} tokens of KV: free some memory, or choose a smaller model"
        )
    if config.max_model_len is not None and config.max_model_len > slots:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} does not fit a KV pool of {slots} tokens: lower it, or raise "
            f"--max-total-tokens ({bytes_per_token(model)} bytes a token)"
        )
    if wanted_len > slots:
        log.warning("the KV pool holds %d tokens: requests are limited to that, not to %d", slots, wanted_len)
    if wanted_len > model.context_length:
        log.warning(
            "requests may have %d tokens; the model was made for %d, what it says beyond may be nonsense",
            wanted_len,
            model.context_length,
        )
    return Capacity(num_slots=slots, max_model_len=min(wanted_len, slots))


def _check_total(slots: int, room: KvRoom, model: Qwen3MoeConfig) -> None:
    needed = slots * bytes_per_token(model, room.num_layers)
    if needed > room.free_bytes:
        raise ConfigError(
            f"--max-total-tokens {slots} needs {needed / GIB:.1f} GiB for the KV pool, but "
            f"{room.free_bytes / GIB:.1f} GiB are free after the weights: ask for at most "
            f"{room.tokens(model, room.share)}"
        )


def allocate(model: Qwen3MoeConfig, num_slots: int, num_layers: int) -> list[KvLayer]:
    """Pages come with their first use, so an idle pool costs no memory."""

    def tensor() -> torch.Tensor:
        return torch.empty(num_slots, model.num_kv_heads, model.head_dim, dtype=torch.float16)

    return [KvLayer(tensor(), tensor()) for _ in range(num_layers)]
