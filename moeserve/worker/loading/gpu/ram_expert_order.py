"""The storage order of a layer's RAM experts."""

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
    """Returns, for each layer that is on the GPU, the ids of its RAM experts, hottest first if counts are known. A
    step that streams a fraction of the experts streams the first ones: streaming an expert costs the same for any
    number of rows, while the CPU's time for it grows with the rows. share: that of the placement; `counts` are then
    the whole model's."""
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
