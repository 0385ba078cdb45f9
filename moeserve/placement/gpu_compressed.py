"""Checks, before any weights are loaded, that the GPU engine supports the configuration with compressed attention."""

from __future__ import annotations

from moeserve.config import ServerConfig, num_drafts
from moeserve.errors import ConfigError
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.interface import ModelShape

WHERE = "for models with compressed attention on a GPU so far"


def check_gpu_compressed(config: ServerConfig, shape: ModelShape) -> None:
    """Raises ConfigError for drafts, and for tiers of the prefix cache."""
    if not isinstance(shape.heads, CompressedAttentionShape):
        return
    if num_drafts(config):
        raise ConfigError(f"--speculative-config: no drafts {WHERE}; leave it out, or say --device cpu")
    if config.kv_disk is not None or config.kv_disk_gib is not None:
        raise ConfigError(f"--kv-disk: there is no disk tier {WHERE}; leave it out, or say --device cpu")
    if config.kv_ram:
        raise ConfigError(f"--kv-ram: there is no RAM tier {WHERE}; leave it out")
