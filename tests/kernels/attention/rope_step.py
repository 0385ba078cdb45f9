"""A step of RoPE on the CPU and its reference."""

from __future__ import annotations

import torch

from moeserve.kernels.stream_operands import KvLayer
from tests.kernels.operations import run_rope_store, stream_of


class Step:
    """Random q, k, v of n tokens, with everything else the operation takes."""

    def __init__(self, n: int, heads: int, kv_heads: int, dim: int, rotary: int | None = None) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        generator = torch.Generator().manual_seed(n * dim + heads)
        self.qkv = random(n, heads, dim), random(n, kv_heads, dim), random(n, kv_heads, dim) * 10
        self.norms: tuple[torch.Tensor | None, torch.Tensor | None] = random(dim), random(dim)
        angles = torch.rand(n, (rotary or dim) // 2, generator=generator, dtype=torch.float64) * 1000
        self.tables = angles.cos().float(), angles.sin().float()
        self.slots = torch.randperm(4 * n, generator=generator)[:n].int()
        self.kv = KvLayer(*(torch.full((4 * n, kv_heads, dim), 7.0, dtype=torch.float16) for _ in range(2)))

    def run(self, isa: str, threads: int = 2, *, scale: float | None = None) -> torch.Tensor:
        stream = stream_of(isa, threads)
        return run_rope_store(
            stream, self.qkv, self.norms, 1e-6, self.tables, self.slots, self.kv, scale=scale
        )
