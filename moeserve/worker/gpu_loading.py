"""From a configuration to a GpuRunner: memory planned, weights, KV pool, recorded decode steps."""

from __future__ import annotations

import logging
from collections.abc import Callable

import psutil
import torch

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.grammar.engine import Engine
from moeserve.kernels.cpu_stream import KvLayer
from moeserve.messages.schema import WorkerReady
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.models.qwen3moe.gpu_model import GpuQwen3Moe
from moeserve.models.qwen3moe.gpu_weights import GpuLoader
from moeserve.models.source import ModelSource
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.constraints import Constraints
from moeserve.worker.gpu_memory import check_weights, free_bytes, planes_bytes, room_bytes
from moeserve.worker.gpu_runner import GpuRunner
from moeserve.worker.kv_pool import Capacity, bytes_per_token, plan_capacity

log = logging.getLogger(__name__)

LANES = 32


def load_gpu_runner(
    config: ServerConfig,
    gguf: ModelSource,
    on_progress: Callable[[str, int, int], None],
    device: torch.device,
) -> GpuRunner:
    """Loads the model and allocates everything a step needs. Raises GGUFError for a bad file, ConfigError where the
    GPU's memory does not suffice."""
    # Its helper thread builds the vocabulary while this one loads the weights.
    constraints = Constraints(config.max_num_seqs, lambda: Engine(TextTokenizer.from_gguf(gguf)))
    model_config = Qwen3MoeConfig.from_gguf(gguf)
    model_config.check_tensors(gguf)
    _check_lanes(gguf, model_config)
    check_weights(gguf, device)
    weights = GpuLoader(gguf, model_config, device, on_progress).load()
    _empty_cache(device)
    max_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    left = free_bytes(device) - room_bytes(config, model_config, max_tokens, device)
    capacity = plan_capacity(config, model_config, max(0, left), device="GPU")
    slot_table = torch.zeros(
        config.max_num_seqs + 1, capacity.max_model_len, dtype=torch.int32, device=device
    )
    kv = allocate(model_config, capacity.num_slots, device)
    model = GpuQwen3Moe(
        model_config, weights, kv, slot_table, max_tokens=max_tokens, max_model_len=capacity.max_model_len
    )
    runner = GpuRunner(model, slot_table, _ready(config, model_config, capacity, gguf, device), constraints)
    runner.record()
    return runner


def allocate(model: Qwen3MoeConfig, num_slots: int, device: torch.device) -> list[KvLayer]:
    """Zeros: what was there before, a NaN say, would come back through masked keys."""
    shape = (num_slots, model.num_kv_heads, model.head_dim)
    return [
        KvLayer(*(torch.zeros(shape, dtype=torch.float16, device=device) for _ in "kv"))
        for _ in range(model.num_layers)
    ]


def _check_lanes(gguf: ModelSource, c: Qwen3MoeConfig) -> None:
    for name, size in (("embedding_length", c.hidden_size), ("expert_feed_forward_length", c.expert_ff)):
        if size % LANES:
            raise ConfigError(f"{gguf.path}: {name} is {size}; the GPU engine needs a multiple of {LANES}")


def _empty_cache(device: torch.device) -> None:
    """What unpacking left behind goes back to the device, whose free memory is then asked for."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _ready(
    config: ServerConfig, model: Qwen3MoeConfig, capacity: Capacity, gguf: ModelSource, device: torch.device
) -> WorkerReady:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    return WorkerReady(
        num_kv_slots=capacity.num_slots,
        max_num_seqs=config.max_num_seqs,
        max_model_len=capacity.max_model_len,
        vocab_size=model.vocab_size,
        weight_bytes=planes_bytes(gguf),
        kv_bytes=capacity.num_slots * bytes_per_token(model),
        rss_bytes=psutil.Process().memory_info().rss,
        device=f"{device.type} ({name})",
        num_experts=model.num_experts,
        experts_per_token=model.top_k,
    )
