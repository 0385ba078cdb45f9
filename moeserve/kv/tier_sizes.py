"""How much memory the tiers behind a GPU's KV pool take. No torch: plan counts by it."""

from __future__ import annotations

from moeserve.config import ServerConfig

# By default: a page that is in the pool is in RAM, too, so that a tier smaller than the pool keeps little.
RAM_SHARE_OF_FREE_MEMORY = 0.25
MOST_POOLS = 4  # times the pool
STAGING_BYTES = 16 << 20  # of GPU memory that pages pass through, in each direction


def default_ram_bytes(
    config: ServerConfig, pool_bytes: int, free_bytes: int, *, has_window_pool: bool
) -> int:
    """Bytes of the tier in RAM where the user does not say. 0: none, as behind two pools."""
    if config.prefix_cache == "off" or has_window_pool:
        return 0
    chosen = min(int(free_bytes * RAM_SHARE_OF_FREE_MEMORY), MOST_POOLS * pool_bytes)
    return 0 if chosen < pool_bytes else chosen


def has_tiers(config: ServerConfig) -> bool:
    """Whether a GPU may have tiers behind its pool."""
    wanted = config.kv_ram != 0 or config.kv_disk is not None
    return wanted and config.prefix_cache != "off" and config.gpus == "1"


def staging_bytes(config: ServerConfig, state_bytes: int) -> int:
    """Bytes of GPU memory for the tiers. state_bytes: those of one slot of recurrent state, which passes through as a
    whole."""
    return 2 * max(STAGING_BYTES, state_bytes) if has_tiers(config) else 0
