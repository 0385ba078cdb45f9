"""Builds `PlacementOptions` from the placement flags and the files that they name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.kv.layout import KvLayout
from moeserve.kv.state_capacity import state_slots
from moeserve.kv.window_capacity import window_pool
from moeserve.models.interface import ModelShape
from moeserve.models.step_buffers import UNPACKED_EXPERTS_ROWS
from moeserve.placement.gpu import Gpu
from moeserve.placement.heat import read_heat
from moeserve.placement.place import MIN_KV_TOKENS, PlacementOptions
from moeserve.placement.placement import Placement
from moeserve.placement.rules import Rules
from moeserve.placement.sizes import ModelSizes
from moeserve.placement.unpacked import given_gib

log = logging.getLogger(__name__)

CACHE_SHARE_OF_RAM = 0.9  # the rest is for the processes' memory besides weights
# tokens of a conversation: with less room for KV, a GPU that is too small gets fewer layers instead
AMPLE_KV_TOKENS = 4096
# tokens of a request: with less room for KV, automatic unpacked experts take nothing. Twice a conversation's: to
# compute an evicted prefix again costs more time than unpacked experts save.
KV_TOKENS_BESIDE_UNPACKED = 8192


def with_state_slots(
    options: PlacementOptions, config: ServerConfig, sizes: ModelSizes, gpu: Gpu
) -> PlacementOptions:
    """Returns `options` with the number of recurrent-state slots (running sequences and snapshots) that fit on this
    GPU beside its dense parts. If even the running sequences' slots do not fit, `place` later reports it or moves
    layers to RAM. Raises ConfigError for a --state-snapshot-budget that does not fit."""
    dense = sizes.embedding.cuda + sizes.head.cuda + sum(layer.dense.cuda for layer in sizes.layers)
    budget = gpu.free_bytes if options.gpu_memory_budget is None else options.gpu_memory_budget
    running = config.max_num_seqs * sizes.state_bytes()
    free = max(running, budget - gpu.reserved_bytes - sizes.record_bytes() - dense)
    return replace(options, state_slots=state_slots(config, sizes.state_bytes(), free).num_slots)


def with_window_pool(
    options: PlacementOptions, config: ServerConfig, layout: KvLayout, step_rows: int
) -> PlacementOptions:
    """Returns `options` with the sliding-window layers' separate KV pool, if they have one. Raises ConfigError for
    an impossible --kv-window-ratio."""
    return replace(options, window_pool=window_pool(config, layout, step_rows))


def with_expert_cache(placement: Placement, sizes: ModelSizes, config: ServerConfig, ram: int) -> Placement:
    """Returns `placement` with an expert cache, if --expert-cache allows it and the copies fit into `ram` bytes."""
    if config.expert_cache == "off" or not any(layer.can_be_cached for layer in placement.layers):
        return placement
    cached = placement.with_cache(sizes)
    if cached.cpu_weight_bytes > ram * CACHE_SHARE_OF_RAM:
        log.info(
            "no expert cache: all experts would take %.1f GiB of RAM, of which %.1f are free",
            cached.cpu_weight_bytes / GIB,
            ram / GIB,
        )
        return placement
    return cached


def heat_counts(config: ServerConfig, shape: ModelShape) -> Sequence[Sequence[int]] | None:
    """Returns the counts of --expert-heat, [layers][experts]; None without that flag. Raises ConfigError for an
    unusable file."""
    if config.expert_heat is None:
        return None
    return read_heat(Path(config.expert_heat), shape.num_layers, shape.num_experts).counts


def placement_options(config: ServerConfig, shape: ModelShape) -> PlacementOptions:
    """Returns the placement options of the configuration. Raises ConfigError for an unusable heat or rules file."""
    return share_options(config, shape, heat_counts(config, shape))


def share_options(
    config: ServerConfig, shape: ModelShape, counts: Sequence[Sequence[int]] | None
) -> PlacementOptions:
    """Returns the placement options for a share of a model: `shape` and `counts` are the share's."""
    rules, budget = config.placement_rules, config.gpu_memory_budget
    longest = config.max_model_len or shape.context_length
    unpacked = given_gib(config)
    return PlacementOptions(
        num_gpu_experts=config.num_gpu_experts,
        gpu_memory_budget=None if budget is None else int(budget * GIB),
        n_gpu_layers=config.n_gpu_layers,
        unpacked_experts=int(unpacked * GIB) if unpacked else None,
        counts=counts,
        rules=None if rules is None else Rules.read(Path(rules)),
        max_total_tokens=config.max_total_tokens,
        most_kv_tokens=config.max_num_seqs * longest,
        least_kv_tokens=min(longest, MIN_KV_TOKENS) if config.max_model_len is None else longest,
        ample_kv_tokens=min(longest, AMPLE_KV_TOKENS) if config.max_model_len is None else longest,
    )


def with_unpacked_beside_kv(
    options: PlacementOptions, config: ServerConfig, shape: ModelShape, step_tokens: int
) -> PlacementOptions:
    """Returns `options` with the KV tokens that --unpacked-experts auto leaves; unchanged for a number of GiB, or if no
    step of up to `step_tokens` tokens would use unpacked experts."""
    if config.unpacked_experts != "auto" or step_tokens <= UNPACKED_EXPERTS_ROWS:
        return options
    longest = config.max_model_len or shape.context_length
    beside = config.max_num_seqs * min(longest, KV_TOKENS_BESIDE_UNPACKED)
    return replace(options, kv_tokens_beside_unpacked=beside)
