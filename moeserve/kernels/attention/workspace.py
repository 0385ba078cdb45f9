"""Buffers and splits of decode attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moeserve.kernels.attention.shares import partial_results
from moeserve.kernels.launch import next_power_of_2

PROGRAMS = 528  # approximate number of programs per decode launch: four per multiprocessor of an H200
MAX_SPLITS = 64
LONG_SPLITS = 16  # minimal number of splits of a long row among rows that fill a GPU without splits


def splits_that_fill(rows: int, kv_heads: int) -> int:
    """Returns the number of splits per row, a power of two up to MAX_SPLITS, with which a launch has about PROGRAMS
    programs."""
    return min(MAX_SPLITS, next_power_of_2(max(1, PROGRAMS // (rows * kv_heads))))


class DecodeWorkspace:
    """Buffers for the partial results of decode rows, for up to `rows` rows. All layers reuse it."""

    def __init__(
        self,
        rows: int,
        heads: int,
        kv_heads: int,
        dim: int,
        device: torch.device | str,
        splits: int | None = None,
        room: DecodeWorkspace | None = None,
    ) -> None:
        """dim: width of a head's value. splits: per row, a power of two; None: as many as fill a GPU with these rows,
        and more for long rows. room: a workspace that is never used at the same time, whose memory is shared if it is
        large enough."""
        self.fill = splits or splits_that_fill(rows, kv_heads)
        self.splits = splits or max(self.fill, LONG_SPLITS)
        group, size = max(16, next_power_of_2(heads // kv_heads)), max(16, next_power_of_2(dim))
        parts = (rows, kv_heads, self.splits, group)
        of_splits = math.prod(parts) * size
        results = partial_results(heads // kv_heads, dim)
        needed = max(of_splits, math.prod(results))
        if room is None or len(room.memory) < needed:
            self.memory: Tensor = torch.empty(needed, device=device)
        else:
            self.memory = room.memory
        self.sums: Tensor = self.memory[:of_splits].view(*parts, size)
        # Partial results that the programs of shares.py exchange.
        self.share_sums = self.memory[: math.prod(results)].view(results)
        self.share_stats = torch.empty(*results[:3], 2, device=device)
        self.stats = torch.empty(*parts, 2, device=device)
        self.counters = torch.zeros(rows, kv_heads, dtype=torch.int32, device=device)
