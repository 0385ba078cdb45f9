"""Checks --speculative-config against the drafts that the GPU engine supports, before any weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.config import ServerConfig, drafts_of
from moeserve.errors import ConfigError
from moeserve.models.interface import ModelShape
from moeserve.placement.placement import Placement


def check_gpu_drafts(config: ServerConfig, shape: ModelShape) -> None:
    """Raises ConfigError if the configured drafts need the CPU engine. shape: the model's shape, including its
    next-token block if the block is to draft."""
    drafts = drafts_of(config)
    if drafts is None:
        return
    if shape.ngrams is not None:
        raise ConfigError(
            "--speculative-config: drafts of models with n-gram embeddings are computed on the CPU alone so far; leave "
            "it out, or say --device cpu"
        )
    if (what := shape.cpu_only_block) is not None:
        raise ConfigError(
            f"--speculative-config: a block with {what} drafts on the CPU alone so far; with a GPU say "
            '{"method": "ngram", "num_speculative_tokens": 4}'
        )


def check_drafts_placed(
    shape: ModelShape, placement: Placement, taps: Sequence[int], *, has_small_model: bool = False
) -> None:
    """Raises ConfigError for an EAGLE-3 head that reads what this GPU does not have, and for a small model beside first
    layers in RAM: the KV budgets of two devices do not count its KV. taps: layers before which the head reads the
    residual; none without one."""
    if (taps or has_small_model) and placement.begins_in_ram:
        what = "an EAGLE-3 head" if taps else "a small model"
        raise ConfigError(
            f"--speculative-config: {what} can draft only if all layers and the embedding are on the GPU, but "
            f"some of them are in RAM: say --n-gpu-layers {shape.num_layers}, which may leave more experts in RAM, or "
            '{"method": "ngram", "num_speculative_tokens": 4}, or free some GPU memory'
        )
    bare = [layer for layer in taps if layer < shape.num_layers and shape.layers[layer].mixer is None]
    if bare:
        raise ConfigError(
            f"--speculative-config: this EAGLE-3 head reads the residual before layer {bare[0]}, which does not "
            "attend; such a head drafts on the CPU alone so far: say --device cpu"
        )
