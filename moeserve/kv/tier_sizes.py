"""How much memory the tiers behind a GPU's KV pool take. No torch: plan counts by it."""

from __future__ import annotations

from moeserve.config import ServerConfig

STAGING_BYTES = 16 << 20  # of GPU memory that pages pass through, in each direction


def has_tiers(config: ServerConfig) -> bool:
    """Whether a GPU may have tiers behind its pool."""
    wanted = config.kv_ram > 0 or config.kv_disk is not None
    return wanted and config.prefix_cache != "off" and config.gpus == "1"


def staging_bytes(config: ServerConfig, state_bytes: int) -> int:
    """Of GPU memory for the tiers. state_bytes: of one slot of recurrent state, which passes through as a whole."""
    return 2 * max(STAGING_BYTES, state_bytes) if has_tiers(config) else 0
