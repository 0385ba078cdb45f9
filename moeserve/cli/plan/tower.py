"""Predicted memory of the vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from moeserve.config import ServerConfig
from moeserve.placement.engine_memory import CUDA_CONTEXT_BYTES
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.tower_memory import cpu_bytes, gpu_bytes, takes_block_float, takes_gpu

# Measured with photos of 3 million pixels: torch, Pillow, and the process that decodes.
VISUALSERVER_BYTES = 250 << 20
CUDA_LIBRARIES_BYTES = 600 << 20  # RAM of a process: torch with CUDA, its context, Triton


class TowerMemory(NamedTuple):
    """Bytes that the tower needs for the largest picture, without the image cache."""

    ram: int = 0
    gpu: int = 0  # including the context of its process


def tower_memory(config: ServerConfig, gpu: int | None) -> TowerMemory:
    """Returns the tower's memory. gpu: bytes of the GPU that has the model or a part of it; None: no GPU has. Raises
    ModelError for a file that is not a vision tower."""
    if config.mmproj is None:
        return TowerMemory()
    _, shape = open_tower(Path(config.mmproj))
    tokens = config.image_max_tokens or shape.default_max_tokens
    if not takes_gpu(config, shape, gpu):
        is_block_float = takes_block_float(config.isa)
        return TowerMemory(VISUALSERVER_BYTES + cpu_bytes(shape, tokens, is_block_float=is_block_float))
    needed = gpu_bytes(shape, tokens) + CUDA_CONTEXT_BYTES
    return TowerMemory(VISUALSERVER_BYTES + CUDA_LIBRARIES_BYTES, 0 if gpu is None else needed)
