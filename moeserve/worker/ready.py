"""What a loaded engine says of itself, whichever device it is on."""

from __future__ import annotations

import psutil

from moeserve.config import ServerConfig
from moeserve.kv.capacity import KvCapacity
from moeserve.kv.layout import KvLayout
from moeserve.messages.schema import WorkerReady


def ready_message(
    config: ServerConfig,
    layout: KvLayout,
    capacity: KvCapacity,
    weight_bytes: int,
    device: str,
    step_tokens: int,
) -> WorkerReady:
    """When everything is allocated: the process's memory is taken now. weight_bytes: on all devices together."""
    return WorkerReady(
        num_kv_slots=capacity.num_slots,
        max_num_seqs=config.max_num_seqs,
        max_model_len=capacity.max_model_len,
        vocab_size=layout.shape.vocab_size,
        weight_bytes=weight_bytes,
        kv_bytes=capacity.num_slots * layout.token_bytes(),
        rss_bytes=psutil.Process().memory_info().rss,
        device=device,
        max_num_batched_tokens=step_tokens,
        num_experts=layout.shape.num_experts,
        experts_per_token=layout.shape.top_k,
    )
