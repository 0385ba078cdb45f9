"""Prefill of one prompt: 48 layers, launched one kernel after another as a server would."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.gpu.layer import LayerWorkspace, StepRows, attention_block, experts_block, random_layer
from benchmarks.gpu.shape import FLOPS_PER_S, SHAPE, seconds
from moeserve.kernels.attention.op import prefill_tiles

TOKENS = (512, 2048, 8192)
KeysValues = tuple[torch.Tensor, torch.Tensor]


def batch_of(n: int) -> StepRows:
    s = SHAPE
    one = np.array
    tiles = prefill_tiles(one([0]), one([n]), one([0]), one([0]), s.heads, s.kv_heads, s.dim)
    angles = torch.rand(n, s.dim // 2, device="cuda")
    slots = torch.randperm(n, device="cuda").int()
    positions = torch.arange(n, dtype=torch.int32, device="cuda")
    return StepRows(
        positions,
        slots,
        torch.zeros_like(slots),
        slots.view(1, n),
        angles.cos(),
        angles.sin(),
        torch.from_numpy(tiles).cuda(),
    )


def flops_of(n: int) -> tuple[float, float]:
    """Floating-point operations of a layer's attention block, and of its experts."""
    s = SHAPE
    q, kv = s.heads * s.dim, s.kv_heads * s.dim
    dense = 2 * n * s.hidden * (2 * q + 2 * kv)
    return dense + 2 * n * n * q, 2 * n * s.hidden * (3 * s.ff * s.top_k + s.experts)


def run() -> None:
    s = SHAPE
    layers = [random_layer(i) for i in range(4)]
    for n in TOKENS:
        workspace, batch = LayerWorkspace(n, decode=False), batch_of(n)
        keys = torch.empty(n, s.kv_heads, s.dim, dtype=torch.float16, device="cuda")
        values = torch.empty_like(keys)
        workspace.x.normal_()

        def attend(
            i: int,
            workspace: LayerWorkspace = workspace,
            batch: StepRows = batch,
            kv: KeysValues = (keys, values),
        ) -> None:
            attention_block(layers[i % 4], workspace, batch, *kv, first=True)

        def compute_experts(i: int, workspace: LayerWorkspace = workspace) -> None:
            experts_block(layers[i % 4], workspace, i)

        attention = seconds(attend, 8, graph=False)
        experts = seconds(compute_experts, 8, graph=False)
        floors = flops_of(n)
        whole = (attention + experts) * s.layers
        print(
            f"prefill {n:5}: {n / whole:7.0f} tok/s; a layer's attention block {attention * 1e6:7.0f} us "
            f"({floors[0] / attention / 1e12:5.0f} TFLOP/s), experts {experts * 1e6:7.0f} us "
            f"({floors[1] / experts / 1e12:5.0f} TFLOP/s); "
            f"{sum(floors) / FLOPS_PER_S * s.layers / whole:5.1%} of the compute floor",
            flush=True,
        )


def warm_up_cases() -> list[tuple[int]]:
    return [(n,) for n in TOKENS]


def warm_up(n: int) -> None:
    s = SHAPE
    workspace, batch = LayerWorkspace(n, decode=False), batch_of(n)
    keys = torch.empty(n, s.kv_heads, s.dim, dtype=torch.float16, device="cuda")
    workspace.x.normal_()
    for i in range(2):
        w = random_layer(i)
        attention_block(w, workspace, batch, keys, torch.empty_like(keys), first=True)
        experts_block(w, workspace, i)
    torch.cuda.synchronize()
