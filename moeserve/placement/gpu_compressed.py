"""Checks the configuration against what the GPU engine does with compressed attention, before any weights are
loaded."""

from __future__ import annotations

from moeserve.config import ServerConfig, num_drafts
from moeserve.errors import ConfigError
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.interface import ModelShape
from moeserve.placement.placement import Placement

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


def check_compressed_placed(shape: ModelShape, placement: Placement) -> None:
    """Raises ConfigError if whole layers are in RAM."""
    if isinstance(shape.heads, CompressedAttentionShape) and placement.layers_in_ram:
        raise ConfigError(
            f"the first {placement.layers_in_ram} layers would be in RAM, which is not done {WHERE}; leave them "
            "more GPU memory (--num-gpu-experts 0 has all experts in RAM, --max-total-tokens and --max-model-len bound "
            "the KV pool), or say --device cpu"
        )
