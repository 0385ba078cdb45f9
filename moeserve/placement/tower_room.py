"""Computes the GPU memory that a vision tower leaves to the model on the same GPU."""

from __future__ import annotations

from dataclasses import replace

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError


def budget_beside_tower(config: ServerConfig, tower_bytes: int) -> ServerConfig:
    """Returns the engine's configuration, in which the tower's bytes are subtracted from --gpu-memory-budget. Without a
    budget nothing changes: the engine takes the free memory, which no longer includes the tower's. Raises ConfigError
    if the budget is too small."""
    if config.gpu_memory_budget is None or not tower_bytes:
        return config
    left = config.gpu_memory_budget - tower_bytes / GIB
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory-budget {config.gpu_memory_budget:g}: the vision tower alone takes "
            f"{tower_bytes / GIB:.2f} GiB; raise the budget, or say --mmproj-device cpu"
        )
    return replace(config, gpu_memory_budget=left)
