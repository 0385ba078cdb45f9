"""What a loaded engine says of itself, whichever device it is on."""

from __future__ import annotations

import psutil

from moeserve.config import ServerConfig
from moeserve.messages.schema import WorkerReady
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.worker.kv_pool import Capacity, bytes_per_token


def ready_message(
    config: ServerConfig,
    model: Qwen3MoeConfig,
    capacity: Capacity,
    weight_bytes: int,
    device: str,
    step_tokens: int,
) -> WorkerReady:
    """When everything is allocated: the process's memory is taken now. weight_bytes: on all devices together."""
    return WorkerReady(
        num_kv_slots=capacity.num_slots,
        max_num_seqs=config.max_num_seqs,
        max_model_len=capacity.max_model_len,
        vocab_size=model.vocab_size,
        weight_bytes=weight_bytes,
        kv_bytes=capacity.num_slots * bytes_per_token(model),
        rss_bytes=psutil.Process().memory_info().rss,
        device=device,
        max_num_batched_tokens=step_tokens,
        num_experts=model.num_experts,
        experts_per_token=model.top_k,
    )
