"""In which order a layer's experts in RAM lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.models.ranks.rank_share import RankShare
from moeserve.placement import Placement
from moeserve.placement.heat import read_heat


def ram_expert_order(
    config: ServerConfig,
    placement: Placement,
    share: RankShare | None = None,
    counts: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """The experts in RAM of each layer on the GPU, the hottest first where that is known: a step that streams some of
    them takes the first, which costs the same whatever their rows, and the CPU's time grows with the rows. share: of
    which the placement is, with the `counts` of the whole model."""
    first, count = placement.layers_in_ram, len(placement.layers)
    places = [placement.cpu_experts(index) for index in range(first, count)]
    ids = [list(own) for own in places]
    if share is not None:
        ids = [[of[place] for place in own] for of, own in zip(share.experts, places, strict=True)]
        first = share.first_layer
    elif config.expert_heat is not None:
        counts = read_heat(Path(config.expert_heat), count, placement.num_experts).counts
    if counts is None:
        return ids
    return [
        sorted(own, key=of.__getitem__, reverse=True) for own, of in zip(ids, counts[first:], strict=False)
    ]
