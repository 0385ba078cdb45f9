"""Tiles of experts with weights as integers in float16, for tune.py: (routes per block, warpgroups, super-blocks of
a stage, stages)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.layer import Q4
from benchmarks.gpu.shape import SHAPE, random_planes
from moeserve.kernels.experts.integers import integers_down, integers_up
from moeserve.kernels.experts.op import align_routes, num_blocks
from moeserve.kernels.linear.integers import IntegerRows, IntegerTile, integer_order
from moeserve.kernels.linear.operands import RouteBlocks

Launch = Callable[[int], None]
TILES: dict[int, list[tuple[int, ...]]] = {  # by rows
    16: [(8, 1, 2, 3), (8, 1, 2, 4), (8, 1, 1, 6), (8, 2, 2, 4)],
    64: [(8, 1, 2, 3), (8, 1, 2, 4), (8, 1, 1, 6), (8, 2, 2, 4)],
    128: [(16, 1, 2, 3), (16, 1, 1, 6), (16, 2, 2, 4), (16, 2, 1, 8)],
    256: [(32, 1, 2, 2), (32, 1, 1, 4), (32, 2, 2, 3), (32, 2, 1, 6), (16, 1, 1, 6), (16, 2, 2, 4)],
    512: [(32, 1, 1, 4), (32, 2, 2, 3), (32, 2, 1, 6), (64, 1, 1, 2), (64, 2, 1, 4)],
    1024: [(32, 1, 1, 4), (32, 2, 2, 3), (32, 2, 1, 6), (64, 2, 1, 4), (128, 2, 1, 2)],
}


def integer_experts(part: str, n: int, tile: tuple[int, ...]) -> tuple[Launch, float]:
    """part: "up" or "down"."""
    s, (block, warpgroups, super_blocks, stages) = SHAPE, tile
    own = IntegerTile(warpgroups, super_blocks, stages)
    count = torch.tensor([n], dtype=torch.int32, device="cuda")
    ids = torch.rand(n, s.experts, device="cuda").topk(s.top_k, 1).indices.int().contiguous()
    blocks = num_blocks(n, s.top_k, s.experts, block)
    routing = RouteBlocks(
        torch.empty(blocks, dtype=torch.int32, device="cuda"),
        torch.empty(blocks, block, dtype=torch.int32, device="cuda"),
    )
    align_routes(ids, count, s.experts, routing.expert, routing.routes)
    share = int(ids.unique().numel()) / s.experts
    if part == "down":
        down = random_planes(Q4, s.experts, s.hidden, s.ff)
        h, parts = _rows(n * s.top_k, s.ff), torch.empty(n, s.top_k, s.hidden, device="cuda")
        integer_order(torch.randn(n * s.top_k, s.ff, device="cuda"), count, h, s.top_k)
        return lambda i: integers_down(h, down, routing, parts, tile=own), down.nbytes * share
    gate, up = (random_planes(Q4, s.experts, s.ff, s.hidden, seed=i) for i in (0, 1))
    x, out = _rows(n, s.hidden), torch.empty(n * s.top_k, s.ff, device="cuda", dtype=torch.bfloat16)
    integer_order(torch.randn(n, s.hidden, device="cuda"), count, x)
    nbytes = (gate.nbytes + up.nbytes) * share
    return lambda i: integers_up(x, gate, up, routing, s.top_k, out, tile=own), nbytes


def _rows(n: int, cols: int) -> IntegerRows:
    halves = [torch.empty(n, width, dtype=torch.float16, device="cuda") for width in (cols, cols // 16)]
    return IntegerRows(halves[0], halves[1], torch.empty(n, device="cuda"))
