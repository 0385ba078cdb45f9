"""Divides a model among the ranks of a group, and connects this rank's share with the others'."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moeserve.config import ServerConfig
from moeserve.kernels.collectives.all_reduce import FromFirst
from moeserve.models.blocks.gpu.stage import Stage
from moeserve.models.blocks.gpu.sums import GpuSums
from moeserve.models.interface import ModelShape
from moeserve.models.ranks.rank_share import RankShare, why_undivided
from moeserve.models.step_buffers import step_sizes
from moeserve.placement import Placement
from moeserve.worker.group.ranks import RankGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Connections:
    """One rank's connections: sums over all ranks, or links to the neighbours' layers."""

    sums: GpuSums | None = None
    from_first: FromFirst | None = None
    stage: Stage | None = None


def with_parallel(config: ServerConfig, shape: ModelShape, devices: Sequence[int]) -> ServerConfig:
    """Returns the configuration with --parallel auto resolved: "layers" if a layer cannot be divided, or if a GPU
    cannot access another's memory (two sums per layer would go through the host); else "tensor"."""
    if config.parallel != "auto":
        return config
    chosen, reason = "tensor", "the GPUs reach one another's memory"
    if undivided := why_undivided(shape, len(devices)):
        chosen, reason = "layers", undivided
    elif not _reach_one_another(devices):
        chosen, reason = "layers", "the GPUs do not reach one another's memory"
    log.info("--parallel %s: %s", chosen, reason)
    return replace(config, parallel=chosen)


def _reach_one_another(devices: Sequence[int]) -> bool:
    pairs = [(one, other) for one in devices for other in devices if one != other]
    return all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)


def connect(share: RankShare, ranks: RankGroup, max_tokens: int, *, is_observed: bool) -> Connections:
    """Connects all ranks. max_tokens: rows of the largest step. is_observed: a `LayerObserver` watches steps on this
    rank."""
    shape = share.shape
    if share.is_stage:
        link = ranks.connect_stages(step_sizes(max_tokens)[-1], shape.hidden_size)
        return Connections(stage=Stage(link, share.rank, share.num_ranks))
    all_reduce, within_norm = ranks.connect(step_sizes(max_tokens), shape.hidden_size, shape.num_experts)
    layers = range(shape.num_layers)
    mixer = all_reduce if share.divides_attention else None
    ffns = [None if layer in share.whole_ffns else all_reduce for layer in layers]
    shows_sums = ranks.of_leader(int(is_observed))  # the other ranks follow the leader
    sums = GpuSums(mixer, ffns, None if shows_sums else within_norm)
    return Connections(sums=sums, from_first=FromFirst(all_reduce, ranks.rank))


def gpu_experts(placement: Placement, share: RankShare | None) -> list[list[int]]:
    """Returns the ids of the experts on the GPU, for each of its layers."""
    if share is None:
        return [list(layer.gpu_experts) for layer in placement.gpu_layers]
    return [
        [ids[place] for place in layer.gpu_experts]
        for ids, layer in zip(share.experts, placement.gpu_layers, strict=True)
    ]
