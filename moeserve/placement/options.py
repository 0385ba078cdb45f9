"""The placement flags of a configuration, with the files they name, as `PlacementOptions`."""

from __future__ import annotations

from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.models.interface import ModelShape
from moeserve.placement.heat import read_heat
from moeserve.placement.place import MIN_KV_TOKENS, PlacementOptions
from moeserve.placement.rules import Rules
from moeserve.units import GIB

AMPLE_KV_TOKENS = 4096  # a talk: rather than less, a GPU that is too small for everything has fewer layers


def placement_options(config: ServerConfig, shape: ModelShape) -> PlacementOptions:
    """Raises ConfigError for a heat or rules file that cannot be used."""
    heat, rules, budget = config.expert_heat, config.placement_rules, config.gpu_memory_budget
    longest = config.max_model_len or shape.context_length
    return PlacementOptions(
        num_gpu_experts=config.num_gpu_experts,
        gpu_memory_budget=None if budget is None else int(budget * GIB),
        n_gpu_layers=config.n_gpu_layers,
        counts=None if heat is None else read_heat(Path(heat), shape.num_layers, shape.num_experts).counts,
        rules=None if rules is None else Rules.read(Path(rules)),
        max_total_tokens=config.max_total_tokens,
        most_kv_tokens=config.max_num_seqs * longest,
        least_kv_tokens=min(longest, MIN_KV_TOKENS) if config.max_model_len is None else longest,
        ample_kv_tokens=min(longest, AMPLE_KV_TOKENS) if config.max_model_len is None else longest,
    )
