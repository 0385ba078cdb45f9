"""What a model takes of a GPU's memory, known before anything is allocated."""

from __future__ import annotations

import psutil
import torch

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kernels.planes import GgmlType, empty_planes
from moeserve.models.gguf import TensorInfo
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.models.qwen3moe.gpu_model import GpuQwen3Moe
from moeserve.models.qwen3moe.gpu_room import room_bytes as layers_room_bytes
from moeserve.models.qwen3moe.gpu_room import step_sizes
from moeserve.models.source import ModelSource
from moeserve.worker.gpu_sampler import sampler_bytes

# CUDA graphs, the kernels' code, cuBLAS-less torch and the allocator's rounding: measured, see docs/hybrid.md.
OVERHEAD_BYTES = 512 << 20


def free_bytes(device: torch.device) -> int:
    """Under Triton's interpreter the CPU's memory stands for the GPU's."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    return torch.cuda.mem_get_info(device)[0]


def tensor_bytes(tensor: TensorInfo) -> int:
    """Of one tensor in planes; vectors are kept as float32."""
    if len(tensor.shape) == 1:
        return 4 * tensor.shape[0]
    return empty_planes(GgmlType(int(tensor.type)), tensor.shape, "meta").nbytes


def planes_bytes(gguf: ModelSource) -> int:
    return sum(tensor_bytes(tensor) for tensor in gguf.tensors.values())


def room_bytes(config: ServerConfig, model: Qwen3MoeConfig, max_tokens: int, device: torch.device) -> int:
    """What a worker takes beside weights and KV pool."""
    sizes = step_sizes(max_tokens)
    head_rows = max(size for size in sizes if size <= GpuQwen3Moe.LOGIT_ROWS)
    logits = 4 * head_rows * model.vocab_size
    length = config.max_model_len or model.context_length
    tables = 4 * (config.max_num_seqs + 1) * length + 4 * length * model.head_dim
    overhead = OVERHEAD_BYTES if device.type == "cuda" else 0
    layers = max(layers_room_bytes(model, size, torch.float32) for size in sizes)
    sampler = sampler_bytes(config.max_num_seqs, model.vocab_size, head_rows)
    return layers + logits + tables + sampler + overhead


def check_weights(gguf: ModelSource, device: torch.device) -> None:
    """Raises ConfigError where the weights alone do not fit."""
    needed, free = planes_bytes(gguf), free_bytes(device)
    if needed + OVERHEAD_BYTES > free and device.type == "cuda":
        raise ConfigError(
            f"the model's weights take {needed / 2**30:.1f} GiB of GPU memory and {free / 2**30:.1f} GiB are free: "
            "free some of it, choose a smaller model or quantisation, or run on the CPU with --device cpu"
        )
