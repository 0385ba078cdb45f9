"""Sums within norms for ranks under Triton's interpreter: their inboxes are in files that all of them map."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeserve.kernels.collectives.sum_norm_op import MessageSize, SumNorm
from moeserve.worker.group.ranks import RankGroup, RankSums

connected: list[SumNorm] = []  # of this process
_mapped: list[torch.Tensor] = []  # as long as they are written to

_connect = RankGroup.connect


def connect(self: RankGroup, rows: Sequence[int], hidden: int, experts: int) -> RankSums:
    """In place of `RankGroup.connect`: with sums within norms for every size."""
    sums = _connect(self, rows, hidden, experts)
    size = MessageSize(self.num_ranks, max(rows), hidden, experts)
    regions = [
        torch.from_file(
            str(self._rendezvous.with_name(f"inboxes-{rank}")),
            shared=True,
            size=size.region_bytes,
            dtype=torch.uint8,
        )
        for rank in range(self.num_ranks)
    ]
    _mapped.extend(regions)
    within = SumNorm(self.rank, size, regions[self.rank], [region.data_ptr() for region in regions])
    for each in rows:
        within.choose(torch.empty(each, 1, hidden))
    connected.append(within)
    return RankSums(sums.all_reduce, within)
