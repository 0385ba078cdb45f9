"""What a model takes of a GPU's memory, known before anything is allocated."""

from __future__ import annotations

import logging

import psutil
import torch

from moeserve.config import ServerConfig
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.models.qwen3moe.gpu_model import GpuQwen3Moe
from moeserve.models.qwen3moe.gpu_room import room_bytes as layers_room_bytes
from moeserve.models.qwen3moe.gpu_room import step_sizes
from moeserve.models.source import ModelSource
from moeserve.placement import Gpu, ModelSizes, Placement, place
from moeserve.placement.options import wishes_of
from moeserve.placement.place import GPU_OVERHEAD_BYTES
from moeserve.placement.sizes import has_float_weights
from moeserve.placement.step_tokens import step_tokens
from moeserve.units import GIB
from moeserve.worker.gpu_sampler import sampler_bytes

log = logging.getLogger(__name__)


def free_bytes(device: torch.device) -> int:
    """Under Triton's interpreter the CPU's memory stands for the GPU's."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    return torch.cuda.mem_get_info(device)[0]


def step_tokens_on(device: torch.device, config: ServerConfig, model: Qwen3MoeConfig) -> int:
    """What a step takes at most."""
    budget = config.gpu_memory_budget
    usable = free_bytes(device) if budget is None else int(budget * GIB)
    return step_tokens(config.max_num_batched_tokens, model, usable)


def room_bytes(
    config: ServerConfig,
    model: Qwen3MoeConfig,
    max_tokens: int,
    device: torch.device,
    *,
    float_weights: bool = False,
) -> int:
    """What a worker takes beside weights and KV pool. float_weights: placement.sizes.has_float_weights."""
    sizes = step_sizes(max_tokens)
    head_rows = max(size for size in sizes if size <= GpuQwen3Moe.LOGIT_ROWS)
    logits = 4 * head_rows * model.vocab_size
    length = config.max_model_len or model.context_length
    tables = 4 * (config.max_num_seqs + 1) * length + 4 * length * model.head_dim
    overhead = GPU_OVERHEAD_BYTES if device.type == "cuda" else 0
    # As gpu_model.float_type: of two bytes, or not.
    floats = torch.bfloat16 if device.type == "cuda" else torch.float32
    layers = max(layers_room_bytes(model, size, floats, float_weights=float_weights) for size in sizes)
    sampler = sampler_bytes(config.max_num_seqs, model.vocab_size, head_rows)
    return layers + logits + tables + sampler + overhead


def plan_placement(
    config: ServerConfig, model: Qwen3MoeConfig, gguf: ModelSource, max_tokens: int, device: torch.device
) -> Placement:
    """Where every part of the model goes. Raises ConfigError where that cannot be, with what would fit."""
    float_weights = has_float_weights(gguf.tensors, model)
    reserved = room_bytes(config, model, max_tokens, device, float_weights=float_weights)
    gpu = Gpu(free_bytes(device), reserved)
    placement = place(ModelSizes.of(gguf.tensors, model), wishes_of(config, model), gpu)
    if placement.begins_in_ram and config.n_gpu_layers is None:
        log.info(
            "the CPU computes the embedding and the first %d of %d layers, the GPU the others; --n-gpu-layers or "
            "--placement-rules choose otherwise",
            placement.layers_in_ram,
            len(placement.layers),
        )
    return placement
