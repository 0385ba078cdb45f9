"""The KV pool's tensors and its size. The router owns the slots; this only holds what they index."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kernels.cpu_stream import KvLayer
from moeserve.models.qwen3moe.config import Qwen3MoeConfig

# The share of the memory left after the weights that the pool takes where the user does not say: the rest is for
# the page cache, the other processes and whatever else runs on the machine. Of a GPU's memory the placement has
# already left the pool its share.
SHARE_OF_FREE_MEMORY = {"CPU": 0.5, "GPU": 1.0}
BYTES_PER_VALUE = 2  # float16

log = logging.getLogger(__name__)


def bytes_per_token(model: Qwen3MoeConfig) -> int:
    return model.num_layers * 2 * model.num_kv_heads * model.head_dim * BYTES_PER_VALUE


@dataclass(frozen=True, slots=True)
class Capacity:
    num_slots: int
    max_model_len: int


def plan_capacity(
    config: ServerConfig, model: Qwen3MoeConfig, free_bytes: int, device: str = "CPU"
) -> Capacity:
    """How many tokens' KV the pool holds and how long a request may be. free_bytes: left after the weights and, on a
    "GPU", the steps' buffers.

    Raises ConfigError where what the user asked for does not fit, with what would.
    """
    wanted_len = config.max_model_len or model.context_length
    per_token = bytes_per_token(model)
    fits = max(0, int(free_bytes * SHARE_OF_FREE_MEMORY[device]) // per_token)
    if config.max_total_tokens is not None:
        slots = config.max_total_tokens
        if slots * per_token > free_bytes:
            raise ConfigError(
                f"--max-total-tokens {slots} needs {slots * per_token / 2**30:.1f} GiB for the KV pool, but "
                f"{free_bytes / 2**30:.1f} GiB are free after the weights: ask for at most {fits}"
            )
    else:
        slots = min(config.max_num_seqs * wanted_len, fits)
    if slots < min(wanted_len, 64):
        kind = "memory" if device == "CPU" else "GPU memory"
        raise ConfigError(
            f"only {free_bytes / 2**30:.2f} GiB of {kind} are free after the weights, room for {fits} tokens of "
            "KV: free some memory, or choose a smaller model"
        )
    if config.max_model_len is not None and config.max_model_len > slots:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} does not fit a KV pool of {slots} tokens: lower it, or raise "
            f"--max-total-tokens ({per_token} bytes a token)"
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


def allocate(model: Qwen3MoeConfig, num_slots: int) -> list[KvLayer]:
    """Pages come with their first use, so an idle pool costs no memory."""

    def tensor() -> torch.Tensor:
        return torch.empty(num_slots, model.num_kv_heads, model.head_dim, dtype=torch.float16)

    return [KvLayer(tensor(), tensor()) for _ in range(model.num_layers)]
