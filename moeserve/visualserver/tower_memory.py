"""The device of a tower, and the memory that the tower takes there. Does not import torch."""

from __future__ import annotations

import math
from typing import Final

from moeserve.config import ServerConfig
from moeserve.placement.engine_memory import CUDA_CONTEXT_BYTES
from moeserve.visualserver.shapes.shape import TowerShape

AUTO_SHARE: Final = 8  # --mmproj-device auto: the tower takes at most this part of a GPU's memory, 1/8
LIBRARIES_BYTES: Final = 96 << 20  # cuBLAS's workspaces, and the bytes by which torch's allocator rounds up
# The allocator keeps blocks for pictures of other sizes: for five pictures it reserved 1.40 times the memory that
# encoding the largest takes (of 4,096 tokens; Qwen3.6's tower, an H200).
RESERVED: Final = 1.5


def cpu_bytes(shape: TowerShape, max_tokens: int) -> int:
    """Returns the bytes of RAM for the weights in float32 and for encoding a picture of `max_tokens` tokens."""
    return 4 * (_floats(shape) + max_tokens * shape.token_floats)


def gpu_bytes(shape: TowerShape, max_tokens: int) -> int:
    """Returns the bytes of GPU memory for the weights in 16 bits and for encoding a picture of `max_tokens` tokens,
    without the process's CUDA context."""
    return 2 * _floats(shape) + int(RESERVED * 4 * max_tokens * shape.token_floats) + LIBRARIES_BYTES


def takes_gpu(config: ServerConfig, shape: TowerShape, gpu: int | None) -> bool:
    """Returns whether the tower computes on the GPU, by --mmproj-device. gpu: bytes of memory of the GPU that holds the
    model or a part of it; None: no GPU holds any of it."""
    if config.mmproj_device != "auto":
        return config.mmproj_device == "cuda"
    if gpu is None:
        return False
    tokens = config.image_max_tokens or shape.default_max_tokens
    return gpu_bytes(shape, tokens) + CUDA_CONTEXT_BYTES <= gpu // AUTO_SHARE


def _floats(shape: TowerShape) -> int:
    return sum(map(math.prod, shape.tensor_shapes().values()))
