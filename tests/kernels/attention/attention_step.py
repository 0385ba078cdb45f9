"""A step of attention on the CPU and its reference."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import torch

from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.stream_operands import KvLayer
from tests.kernels.operations import run_attention, stream_of

# (position, count): around a block of 32 keys, a tile of 16 rows, a segment of 1024 keys; decode and prefill mixed.
BORDERS = [
    *[(position, 1) for position in (0, 30, 31, 32, 33, 63, 64, 1022, 1023, 1024, 1025, 2047, 2048)],
    *[(0, count) for count in (2, 15, 16, 17, 31, 32, 33, 48)],
    *[(15, 17), (31, 2), (1000, 40), (1008, 16), (1020, 3), (1023, 2), (2040, 33)],
]


class Step:
    """The sequences of a step, their KV scattered over a pool, everything else in it poisoned."""

    def __init__(
        self, spans: List[tuple[int, int]], heads: int, kv_heads: int, dim: int, *, sharpness: float = 1.0
    ) -> None:
        generator = torch.Generator().manual_seed(heads * dim)
        used = sum(position + count for position, count in spans)
        pool = torch.randperm(2 * used, generator=generator)
        self.sequences, row, slot = [], 0, 0
        for position, count in spans:
            self.sequences.append(Sequence(row, count, position, pool[slot : slot + position + count]))
            row, slot = row + count, slot + position + count
        keys, values = (torch.randn(2 * used, kv_heads, dim, generator=generator).half() for _ in range(2))
        keys[pool[used:]] = values[pool[used:]] = float("nan")
        self.kv = KvLayer(keys, values)
        self.q = torch.randn(row, heads, dim, generator=generator) * (sharpness / dim**0.5)

    def expected(self, **options: Any) -> torch.Tensor:
        return attention(self.q, self.kv.keys, self.kv.values, self.sequences, **options)

    def run(self, isa: str, threads: int = 2, **options: Any) -> torch.Tensor:
        return run_attention(stream_of(isa, threads), self.q, self.kv, self.sequences, **options).f32
