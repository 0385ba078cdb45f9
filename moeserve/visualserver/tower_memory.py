"""The device of a tower, and the memory that the tower takes there. Does not import torch."""

from __future__ import annotations

import math
from typing import Final

from moeserve.config import ServerConfig
from moeserve.config.engine_config import MEASURED
from moeserve.placement.engine_memory import CUDA_CONTEXT_BYTES
from moeserve.visualserver.shapes.shape import TowerShape, is_matrix, packed_matrix_bytes

AUTO_SHARE: Final = 8  # --mmproj-device auto: the tower takes at most this part of a GPU's memory, 1/8
LIBRARIES_BYTES: Final = 96 << 20  # cuBLAS's workspaces, and the bytes by which torch's allocator rounds up
# The allocator keeps blocks for pictures of other sizes: for five pictures it reserved 1.40 times the memory that
# encoding the largest takes (of 4,096 tokens; Qwen3.6's tower, an H200).
RESERVED: Final = 1.5
# The C library takes blocks of up to 32 MiB from its heap, where freed blocks lie between those in use: pictures of
# 400, 600 and 900 tokens took 1.8 to 2.0 times the bytes in use (Qwen3.6's tower). Larger blocks are mappings.
HEAP_BLOCK_BYTES: Final = 32 << 20
HEAP_FACTOR: Final = 2
SUMMED: Final = ("v.patch_embd.weight.1",)  # added to another tensor while they are loaded


def takes_block_float(isa: str) -> bool:
    """Returns whether the tower computes in block floating point on this CPU: with AVX-512 VNNI, if --isa does not name
    another instruction set."""
    from moeserve.kernels.block_float import has_block_float  # imports torch

    takes_widest = isa in MEASURED or isa.startswith("avx512")
    return takes_widest and has_block_float()


def cpu_bytes(shape: TowerShape, max_tokens: int, *, is_block_float: bool) -> int:
    """Returns the bytes of RAM for the weights and for encoding a picture of `max_tokens` tokens."""
    weights = loaded = 0
    for name, sizes in shape.tensor_shapes().items():
        if is_block_float and is_matrix(name, sizes):
            weights += packed_matrix_bytes(*sizes)
            loaded = max(loaded, 4 * math.prod(sizes))  # in float32 until it is packed
        elif name not in SUMMED:
            weights += 4 * math.prod(sizes)
    picture = picture_bytes(shape, max_tokens, is_block_float=is_block_float)
    if 4 * shape.patches(max_tokens) * shape.hidden < HEAP_BLOCK_BYTES:
        picture *= HEAP_FACTOR
    return weights + max(picture, loaded)


def picture_bytes(shape: TowerShape, tokens: int, *, is_block_float: bool) -> int:
    """Returns the bytes in use while a picture of `tokens` tokens is encoded on the CPU: pixels, twice, and patches."""
    pixels = 3 * tokens * shape.token_side**2
    return 2 * pixels + 4 * shape.patches(tokens) * shape.patch_floats(is_block_float=is_block_float)


def gpu_bytes(shape: TowerShape, max_tokens: int) -> int:
    """Returns the bytes of GPU memory for the weights in 16 bits and for encoding a picture of `max_tokens` tokens,
    without the process's CUDA context."""
    return 2 * _floats(shape) + int(RESERVED * 4 * max_tokens * shape.token_floats) + LIBRARIES_BYTES


def takes_gpu(config: ServerConfig, shape: TowerShape, gpu: int | None) -> bool:
    """Returns whether the tower computes on the GPU, by --mmproj-device; with "auto" it does if it takes at most 1 /
    AUTO_SHARE of the GPU's memory. gpu: bytes of memory of the GPU that holds the model or a part of it; None: no GPU
    holds any of it."""
    if config.mmproj_device != "auto":
        return config.mmproj_device == "cuda"
    if gpu is None:
        return False
    tokens = config.image_max_tokens or shape.default_max_tokens
    return gpu_bytes(shape, tokens) + CUDA_CONTEXT_BYTES <= gpu // AUTO_SHARE


def _floats(shape: TowerShape) -> int:
    return sum(map(math.prod, shape.tensor_shapes().values()))
