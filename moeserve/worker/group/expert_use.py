"""Combines the expert counts of the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.ranks import RankExperts
from moeserve.messages.steps import ExpertUse
from moeserve.worker.engines.engine import Engine


def rank_experts(engine: Engine, first_layer: int) -> RankExperts:
    """Returns one rank's counts; its layer 0 is the model's `first_layer`."""
    tokens, on_gpu, cache = engine.expert_counts()
    layers, experts = tokens.shape
    return RankExperts(first_layer, layers, experts, tokens.tobytes(), on_gpu.tobytes(), cache)


def together(ranks: Sequence[RankExperts], num_experts: int, experts_per_token: int) -> ExpertUse:
    """Combines the counts of all ranks, in the order of ranks, and returns them as those of the whole model. A layer
    that several ranks share was counted equally by each; an expert is in GPU memory if it is on one of them. Raises
    ValueError for counts of the wrong size."""
    layers = max(rank.first_layer + rank.layers for rank in ranks)
    tokens = np.zeros((layers, num_experts), np.int64)
    on_gpu = np.zeros((layers, num_experts), np.uint8)
    for number, rank in enumerate(ranks, 1):
        size = (rank.layers, rank.experts)
        at = slice(rank.first_layer, rank.first_layer + rank.layers), slice(rank.experts)
        tokens[at] = np.maximum(tokens[at], np.frombuffer(rank.tokens, np.int64).reshape(size))
        on_gpu[at] = np.maximum(on_gpu[at], number * np.frombuffer(rank.on_gpu, np.uint8).reshape(size))
    caches = [rank.cache for rank in ranks if rank.cache is not None]
    cache = reduce(ExpertCacheCounts.plus, caches) if caches else None
    return ExpertUse(layers, num_experts, experts_per_token, tokens.tobytes(), on_gpu.tobytes(), cache)
