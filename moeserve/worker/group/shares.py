"""A model's division among the ranks of a group: how, and this rank's share of it, connected with the others'."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kernels.collectives.all_reduce import FromFirst
from moeserve.models.blocks.gpu.stage import Stage
from moeserve.models.blocks.gpu.sums import GpuSums
from moeserve.models.interface import ModelShape
from moeserve.models.rank_share import RankShare, share_of, stage_of
from moeserve.models.sources.source import ModelSource
from moeserve.models.step_buffers import step_sizes
from moeserve.placement import Placement
from moeserve.worker.group.ranks import RankGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Connections:
    """Of one rank with the others: sums, or the neighbours of its layers."""

    sums: GpuSums | None = None
    from_first: FromFirst | None = None
    stage: Stage | None = None


def with_parallel(config: ServerConfig, shape: ModelShape, devices: Sequence[int]) -> ServerConfig:
    """The same with --parallel chosen, where it says auto: by layers where a layer cannot be divided, or where some GPU
    does not reach another's memory, so that two sums a layer would go through the host; else tensor."""
    if config.parallel != "auto":
        return config
    chosen, reason = "tensor", "the GPUs reach one another's memory"
    if shape.is_sandwiched:
        chosen, reason = "layers", f"{shape.architecture} has norms behind its blocks, which are not divided"
    elif any(layer.moe and layer.num_experts < len(devices) for layer in shape.layers):
        chosen, reason = "layers", "a layer has fewer experts than there are GPUs"
    elif not _reach_one_another(devices):
        chosen, reason = "layers", "the GPUs do not reach one another's memory"
    log.info("--parallel %s: %s", chosen, reason)
    return replace(config, parallel=chosen)


def _reach_one_another(devices: Sequence[int]) -> bool:
    pairs = [(one, other) for one in devices for other in devices if one != other]
    return all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)


def share_among(
    config: ServerConfig,
    source: ModelSource,
    shape: ModelShape,
    ranks: RankGroup,
    counts: Sequence[Sequence[int]] | None,
) -> RankShare:
    """What `ranks.rank` has. counts: [layers][experts], tokens routed to each. ConfigError where it cannot be."""
    try:
        if config.parallel == "layers":
            return stage_of(shape, source.tensors, ranks.rank, ranks.num_ranks)
        return share_of(shape, source.tensors, ranks.rank, ranks.num_ranks, counts)
    except ValueError as error:
        remedy = (
            "choose fewer GPUs" if config.parallel == "layers" else "choose fewer GPUs, or --parallel layers"
        )
        raise ConfigError(f"--gpus {config.gpus}: {error}; {remedy}") from error


def connect(share: RankShare, ranks: RankGroup, max_tokens: int, *, is_observed: bool) -> Connections:
    """Waits for all ranks. max_tokens: of a step. is_observed: on this rank a `LayerObserver` sees some steps."""
    shape = share.shape
    if share.is_stage:
        link = ranks.connect_stages(step_sizes(max_tokens)[-1], shape.hidden_size)
        return Connections(stage=Stage(link, share.rank, share.num_ranks))
    all_reduce, within_norm = ranks.connect(step_sizes(max_tokens), shape.hidden_size, shape.num_experts)
    layers = range(shape.num_layers)
    mixer = all_reduce if share.divides_attention else None
    ffns = [None if layer in share.whole_ffns else all_reduce for layer in layers]
    shows_sums = ranks.of_leader(int(is_observed))  # the others do as it does
    sums = GpuSums(mixer, ffns, None if shows_sums else within_norm)
    return Connections(sums=sums, from_first=FromFirst(all_reduce, ranks.rank))


def gpu_experts(placement: Placement, share: RankShare | None) -> list[list[int]]:
    """Of each layer on the GPU, the ids of its experts there."""
    if share is None:
        return [list(layer.gpu_experts) for layer in placement.gpu_layers]
    return [
        [ids[place] for place in layer.gpu_experts]
        for ids, layer in zip(share.experts, placement.gpu_layers, strict=True)
    ]
