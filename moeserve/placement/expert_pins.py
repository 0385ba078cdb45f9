"""Finds the experts that --placement-rules keep in RAM while others are on disk (CPU engine)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.placement.rules import Rules
from moeserve.placement.sizes import ModelSizes

Pinned = Sequence[frozenset[int]]  # by layer


def pinned_experts(config: ServerConfig, sizes: ModelSizes) -> Pinned:
    """Returns each layer's experts for which a rule says `cpu`; none without rules. Raises ConfigError for an unusable
    file, a rule that needs a GPU, and a rule that matches no expert."""
    pinned: list[frozenset[int]] = [frozenset()] * len(sizes.layers)
    if config.placement_rules is None:
        return pinned
    rules = Rules.read(Path(config.placement_rules))
    for index, layer in enumerate(sizes.layers):
        stays: set[int] = set()
        for expert in range(layer.num_experts):
            modules = (f"blk.{index}.experts", f"blk.{index}.experts.{expert}")
            decision = rules.decide(f"expert {expert} of layer {index}", layer.expert_tensors, modules)
            if decision is None:
                continue
            if "cuda" in (decision.device, decision.prefill):
                raise rules.error(decision, "is impossible: the CPU engine computes everything")
            if decision.device == "cpu":
                stays.add(expert)
        pinned[index] = frozenset(stays)
    rules.check_all_applied()
    return pinned
