"""Sizes of the prefix cache's tiers behind a GPU's KV pool. No torch, as `moeserve plan` uses it."""

from __future__ import annotations

from moeserve.config import ServerConfig

# Default share. Pages in the pool are also in RAM, so a RAM tier smaller than the pool adds little.
RAM_SHARE_OF_FREE_MEMORY = 0.25
MOST_POOLS = 4  # default limit, as a multiple of the pool
STAGING_BYTES = 16 << 20  # GPU memory of the staging buffer, per direction


def default_ram_bytes(
    config: ServerConfig, pool_bytes: int, free_bytes: int, *, has_window_pool: bool
) -> int:
    """Returns the default size of the RAM tier in bytes; 0 (no tier) if the model has a separate window pool."""
    if config.prefix_cache == "off" or has_window_pool:
        return 0
    chosen = min(int(free_bytes * RAM_SHARE_OF_FREE_MEMORY), MOST_POOLS * pool_bytes)
    return 0 if chosen < pool_bytes else chosen


def has_tiers(config: ServerConfig) -> bool:
    """True if the configuration allows tiers behind a GPU's KV pool."""
    wanted = config.kv_ram != 0 or config.kv_disk is not None
    return wanted and config.prefix_cache != "off" and config.gpus == "1"


def staging_bytes(config: ServerConfig, state_bytes: int) -> int:
    """Returns the bytes of GPU memory that the tiers' staging takes. state_bytes: one slot of recurrent state, which
    is staged whole."""
    return 2 * max(STAGING_BYTES, state_bytes) if has_tiers(config) else 0
