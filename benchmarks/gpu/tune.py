"""Times tiles other than the chosen ones (in the `op.py`s), to find what to change if a kernel is far from its bound.

Every case is timed as in kernels.py: in a CUDA graph, over weights larger than the cache. A tile that is faster alone
may be slower in a layer (docs/results/gpu-kernels.md has cases), so `gpu_kernels.py decode` decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.gpu.layer import Q4, Q6
from benchmarks.gpu.shape import BYTES_PER_S, FLOPS_PER_S, SHAPE, random_planes, seconds, tensors
from benchmarks.gpu.tune_integers import TILES, integer_experts
from moeserve.kernels import launch as kernels
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention import op as attention
from moeserve.kernels.attention.new_tokens import NewTokens
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.experts.op import align_routes, num_blocks
from moeserve.kernels.experts.small_batch import small_batch_down, small_batch_up
from moeserve.kernels.linear.op import GemmTile, GemvTile, gemv_tile, run_gated_gemm, run_gemm, run_gemv
from moeserve.kernels.linear.operands import RouteBlocks, weight_of
from moeserve.quantization import QuantType

Case = tuple[str, int, tuple[int, ...]]  # what, rows, tile
Launch = Callable[[int], None]
MATRICES = {"qkv": (Q4, 5120, 2048), "attn_output": (Q4, 2048, 4096), "head": (Q6, SHAPE.vocab, SHAPE.hidden)}


def counter(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device="cuda")


def activations(n: int, cols: int, dtype: torch.dtype) -> GpuActivations:
    a = GpuActivations.empty(n, cols, "cuda", dtype=dtype, quantised=True)
    for t in (a.x, a.scales):
        assert t is not None
        t.normal_()
    assert a.codes is not None
    a.codes.random_(-127, 128)
    return a


def gemm_tile(tile: tuple[int, ...]) -> GemmTile:
    bm, bn, ub, warps, stages, *more = tile
    return GemmTile(bm, bn, ub, warps, stages, bool(more), more[1] if len(more) > 1 else None)


def dense(name: str, n: int, tile: tuple[int, ...]) -> tuple[Launch, float]:
    """A matrix of the attention block or the head. tile: a GemmTile, or (tokens, nb, warps) of a GEMV."""
    kind, rows, cols = MATRICES[name]
    copies = [random_planes(kind, rows, cols, seed=i) for i in range(1 if name == "head" else 12)]
    weights = [weight_of(tensors(p), int(kind), cols) for p in copies]
    x, out, count = activations(n, cols, torch.bfloat16), torch.empty(n, rows, device="cuda"), counter(n)

    def launch(i: int) -> None:
        w = weights[i % len(weights)]
        if len(tile) == 3:
            gemv = gemv_tile(w, tokens=tile[0], nb=tile[1], warps=tile[2])
            run_gemv(None, x.codes, x.scales, w, None, count, out, tile=gemv, blocks=-(-n // tile[0]))
        else:
            assert x.x is not None
            run_gemm(x.x, w, None, None, count, out, tile=gemm_tile(tile))

    return launch, copies[0].nbytes


def routings(n: int, block: int) -> tuple[list[RouteBlocks], list[Tensor], float]:
    """Uniform choices of experts, sorted in blocks and as they are, and the share of the experts that they meet."""
    s, made, every, distinct = SHAPE, [], [], 0
    for _ in range(4):
        ids = torch.rand(n, s.experts, device="cuda").topk(s.top_k, 1).indices.int().contiguous()
        distinct += int(torch.unique(ids).numel())
        every.append(ids)
        blocks = num_blocks(n, s.top_k, s.experts, block)
        expert = torch.empty(blocks, dtype=torch.int32, device="cuda")
        routes = torch.empty(blocks, block, dtype=torch.int32, device="cuda")
        align_routes(ids, counter(n), s.experts, expert, routes)
        made.append(RouteBlocks(expert, routes))
    return made, every, distinct / len(made) / s.experts


def experts_up(n: int, tile: tuple[int, ...]) -> tuple[Launch, float]:
    """tile: a GemmTile, or (br, nb, bk, warps) of a GEMV."""
    s = SHAPE
    gate, up = (random_planes(Q4, s.experts, s.ff, s.hidden, seed=i) for i in (0, 1))
    matrices = (tensors(gate), int(Q4), tensors(up), int(Q4), s.hidden)
    g, u = weight_of(tensors(gate), int(Q4), s.hidden), weight_of(tensors(up), int(Q4), s.hidden)
    routing, ids, share = routings(n, tile[0] if len(tile) >= 5 else 16)
    x = activations(n, s.hidden, torch.bfloat16)
    h = GpuActivations.empty(n * s.top_k, s.ff, "cuda", dtype=torch.bfloat16, quantised=True)

    def launch(i: int) -> None:
        if len(tile) == 4:
            small_batch_up(
                None, x.codes, x.scales, *matrices, ids[i % 4], None, h.codes, h.scales, tile=GemvTile(*tile)
            )  # fmt: skip
        else:
            assert x.x is not None
            assert h.x is not None
            run_gated_gemm(x.x, g, u, routing[i % 4], s.top_k, h.x, tile=gemm_tile(tile))

    return launch, (gate.nbytes + up.nbytes) * share


def experts_down(kind: QuantType, n: int, tile: tuple[int, ...]) -> tuple[Launch, float]:
    """tile: a GemmTile, or (br, nb, bk, warps) of a GEMV."""
    s = SHAPE
    down = random_planes(kind, s.experts, s.hidden, s.ff)
    w = weight_of(tensors(down), int(kind), s.ff)
    routing, ids, share = routings(n, tile[0] if len(tile) >= 5 else 16)
    h = activations(n * s.top_k, s.ff, torch.bfloat16)
    out = torch.empty(n * s.top_k, s.hidden, device="cuda", dtype=torch.bfloat16)
    counts, weights = counter(n * s.top_k), torch.rand(n, s.top_k, device="cuda")

    def launch(i: int) -> None:
        if len(tile) == 4:
            small_batch_down(
                None, h.codes, h.scales, tensors(down), int(kind), s.ff, ids[i % 4], weights, counts, out[:n],
                tile=GemvTile(*tile),
            )  # fmt: skip
        else:
            assert h.x is not None
            run_gemm(h.x, w, None, routing[i % 4], counts, out, tile=gemm_tile(tile))

    return launch, down.nbytes * share


def decode_attention(n: int, tile: tuple[int, ...]) -> tuple[Launch, float]:
    """tile: the context's length; then a DecodeTile, or nothing for Hopper's equal shares."""
    s, (length, *portable) = SHAPE, tile
    kernels.WARPGROUPS = not portable
    slots = n * length
    pools = [torch.randn(2, slots, s.kv_heads, s.dim, device="cuda").half() for _ in range(2)]
    table = torch.arange(slots, dtype=torch.int32, device="cuda").view(n, length)
    rows = torch.arange(n, dtype=torch.int32, device="cuda")
    positions = torch.full((n,), length - 1, dtype=torch.int32, device="cuda")
    fused = torch.randn(n, (s.heads + 2 * s.kv_heads) * s.dim, device="cuda")
    q, k, v = fused.split([s.heads * s.dim, s.kv_heads * s.dim, s.kv_heads * s.dim], dim=1)
    ones, angles = torch.ones(s.dim, device="cuda"), torch.rand(length, s.dim // 2, device="cuda")
    new = NewTokens(k, v, ones, ones, s.eps, angles.cos(), angles.sin(), table[:, -1].contiguous())
    workspace = DecodeWorkspace(n, s.heads, s.kv_heads, s.dim, "cuda")
    out, count = torch.empty(n, s.heads * s.dim, device="cuda"), counter(n)

    def launch(i: int) -> None:
        if portable:
            attention.DECODE[128] = attention.DecodeTile(*portable)
        keys, values = pools[i % 2]
        attention.decode_attention(
            q, new, keys, values, table, rows, positions, count, workspace, out, None, None,
        )  # fmt: skip

    return launch, pools[0].nbytes


def prefill_attention(
    heads: int, kv_heads: int, dim: int, n: int, tile: tuple[int, ...]
) -> tuple[Launch, float]:
    """A chunk of n tokens behind tile[0] others, in slots in order if tile[1] is 1; then a PrefillTile, or nothing for
    Hopper's warpgroups. The floor is that of the operations."""
    start, in_order, *portable = tile
    kernels.WARPGROUPS = not portable
    if portable:
        attention.PREFILL[dim] = attention.PrefillTile(*portable)
    length = start + n
    keys, values = torch.randn(2, length, kv_heads, dim, device="cuda").half()
    slots = torch.arange(length, device="cuda") if in_order else torch.randperm(length, device="cuda")
    table = slots.int().view(1, length)
    q = (torch.randn(n, heads, dim, device="cuda") * dim**-0.5).half()
    out = torch.empty(n, heads * dim, device="cuda", dtype=torch.bfloat16)
    one = np.ones(1, np.int32)
    tiles = torch.from_numpy(
        attention.prefill_tiles(0 * one, n * one, start * one, 0 * one, heads, kv_heads, dim)
    ).cuda()

    def launch(i: int) -> None:
        attention.prefill_attention(q, keys, values, table, tiles, out)

    operations = 4 * heads * dim * (n * start + n * (n + 1) // 2)
    return launch, operations / FLOPS_PER_S * BYTES_PER_S


def case(what: str, n: int, tile: tuple[int, ...]) -> tuple[Launch, float]:
    if what in MATRICES:
        return dense(what, n, tile)
    makers: dict[str, Callable[[int, tuple[int, ...]], tuple[Launch, float]]] = {
        "up": experts_up,
        "down_q6": partial(experts_down, Q6),
        "down_q4": partial(experts_down, Q4),
        "up_integers": partial(integer_experts, "up"),
        "down_integers": partial(integer_experts, "down"),
        "decode_attention": decode_attention,
        **{name: partial(prefill_attention, *shape) for name, (shape, _) in PREFILL.items()},
    }
    return makers[what](n, tile)


Tiles = dict[int, list[tuple[int, ...]]]  # by rows
U = 1  # sliced K
GEMV: Tiles = {  # of the dense products: (tokens, nb, warps)
    1: [(1, 4, 2), (1, 4, 4), (1, 2, 4), (1, 2, 8)],
    8: [(4, 4, 2), (4, 4, 4), (8, 4, 4), (2, 4, 4), (8, 2, 8)],
}
GEMM: Tiles = {  # of the dense products
    8: [(8, 64, 4, 4, 2, U), (8, 64, 2, 4, 3, U)],
    16: [(16, 64, 4, 4, 2, U), (16, 64, 2, 4, 3, U)],
    32: [(32, 64, 2, 4, 3), (16, 32, 4, 4, 2, U), (16, 64, 4, 4, 2, U), (32, 64, 2, 4, 3, U)],
    64: [
        (64, 64, 2, 8, 3),
        (16, 64, 4, 4, 2, U),
        (16, 64, 4, 4, 3, U),
        (32, 64, 4, 4, 2, U),
        (64, 64, 2, 4, 3, U),
        (64, 128, 2, 4, 2, U),
    ],
    128: [(64, 128, 2, 4, 2), (64, 64, 2, 2, 2)],
    8192: [
        (64, 128, 2, 4, 2),
        (128, 128, 2, 8, 2),
        (64, 128, 1, 4, 3),
        (128, 256, 1, 8, 3),
        (128, 128, 1, 4, 3),
    ],
}
UP: Tiles = {
    1: [(16, 2, 2048, 8), (8, 4, 2048, 4), (32, 1, 1024, 8)],
    8: [(16, 2, 1024, 4), (16, 2, 2048, 8), (8, 4, 2048, 4), (32, 1, 1024, 8)],
    16: [(8, 4, 2048, 4), (8, 32, 4, 4, 2, U, 128), (8, 32, 4, 4, 3, U)],
    32: [(8, 4, 2048, 4), (8, 32, 4, 4, 2, U, 128), (8, 32, 4, 4, 3, U), (8, 32, 2, 2, 3, U)],
    64: [
        (16, 32, 2, 2, 2),
        (8, 32, 4, 4, 2, U, 128),
        (8, 32, 4, 4, 3, U),
        (8, 64, 2, 4, 3, U),
        (8, 32, 2, 2, 3, U),
    ],
    128: [(16, 32, 2, 2, 2), (8, 32, 4, 4, 2, U, 128), (8, 64, 2, 4, 3, U)],
    256: [(16, 64, 2, 2, 2), (32, 64, 2, 2, 2), (64, 64, 2, 4, 2)],
    512: [
        (64, 64, 2, 4, 2),
        (64, 64, 2, 8, 2),
        (64, 64, 2, 4, 2, U),
        (64, 32, 2, 2, 2, U),
        (64, 32, 2, 4, 2, U),
        (32, 32, 2, 2, 2, U),
        (32, 64, 2, 2, 2),
        (32, 64, 2, 4, 2),
        (32, 64, 2, 4, 2, U),
    ],
    1024: [
        (64, 64, 2, 4, 2),
        (64, 64, 2, 8, 2),
        (64, 64, 2, 4, 3),
        (64, 64, 2, 4, 2, U),
        (64, 64, 2, 8, 2, U),
        (64, 32, 2, 4, 2, U),
        (64, 32, 2, 2, 2, U),
        (64, 128, 2, 8, 2),
        (128, 64, 2, 8, 2),
        (128, 64, 2, 4, 2),
        (128, 32, 2, 4, 2, U),
        (32, 32, 2, 2, 2, U),
        (32, 64, 2, 2, 2),
    ],
    8192: [
        (64, 64, 2, 4, 2),
        (64, 64, 2, 4, 3),
        (64, 128, 2, 8, 2),
        (128, 64, 2, 4, 2),
        (128, 64, 2, 8, 2),
        (64, 64, 1, 4, 3),
        (128, 128, 2, 8, 2),
        (128, 128, 1, 8, 3),
        (128, 64, 1, 4, 3),
    ],
}
DOWN: Tiles = {
    1: [(4, 4, 8192, 8), (2, 4, 8192, 4), (8, 2, 2048, 4), (16, 1, 2048, 8)],
    8: [(4, 4, 4096, 4), (16, 4, 1024, 4), (8, 4, 2048, 4), (4, 4, 8192, 8), (8, 2, 2048, 4)],
    16: [(8, 64, 2, 2, 2, U), (8, 64, 2, 4, 3, U), (8, 32, 2, 2, 3, U)],
    32: [(8, 4, 2048, 4), (8, 64, 2, 2, 2, U), (8, 64, 2, 4, 3, U), (8, 128, 2, 4, 2, U)],
    64: [
        (16, 64, 2, 2, 2),
        (8, 64, 2, 2, 2, U),
        (8, 64, 2, 4, 3, U),
        (8, 64, 2, 2, 2, U, 96),
        (8, 128, 2, 4, 2, U),
    ],
    128: [(16, 64, 2, 2, 2), (8, 64, 2, 2, 2, U)],
    256: [(16, 64, 2, 2, 2), (32, 64, 2, 2, 2), (64, 128, 2, 4, 2)],
    512: [
        (64, 128, 2, 4, 2),
        (64, 64, 2, 2, 2),
        (64, 64, 2, 4, 2),
        (64, 64, 2, 4, 3),
        (64, 64, 2, 4, 2, U),
        (32, 64, 2, 2, 2),
        (32, 64, 2, 2, 3),
        (32, 128, 2, 4, 2),
    ],
    1024: [
        (64, 128, 2, 4, 2),
        (64, 64, 2, 2, 2),
        (64, 64, 2, 4, 2),
        (64, 64, 2, 4, 3),
        (64, 64, 2, 4, 2, U),
        (64, 128, 2, 8, 2),
        (64, 128, 2, 4, 3),
        (128, 128, 2, 8, 2),
        (128, 64, 2, 4, 2),
        (32, 64, 2, 2, 2),
    ],
    8192: [
        (64, 128, 2, 4, 2),
        (64, 128, 2, 4, 3),
        (64, 256, 2, 8, 2),
        (128, 128, 2, 8, 2),
        (128, 128, 2, 4, 2),
        (64, 128, 1, 4, 3),
        (128, 256, 1, 8, 3),
        (128, 64, 2, 4, 3),
        (128, 128, 1, 4, 3),
    ],
}
PREFILL = {  # by name: query heads, heads of keys, width of a head, and PrefillTiles
    "prefill_attention": ((SHAPE.heads, SHAPE.kv_heads, SHAPE.dim), [(128, 128, 8, 2), (128, 64, 8, 3)]),
    "prefill_attention_256": ((16, 2, 256), [(128, 64, 8, 2), (64, 64, 4, 2)]),  # Qwen3.6-35B-A3B's
    "prefill_attention_64": ((64, 8, 64), [(128, 128, 8, 2)]),  # gpt-oss's
}


def cases() -> Iterator[Case]:
    """All, or those whose name and rows the variable MOESERVE_TUNE has: "up:8192,prefill_attention"."""
    wanted = [part.partition(":") for part in os.environ.get("MOESERVE_TUNE", "").split(",") if part]
    for what, n, tile in _all_cases():
        if not wanted or any(name == what and rows in ("", str(n)) for name, _, rows in wanted):
            yield what, n, tile


def _all_cases() -> Iterator[Case]:
    for tiles in (GEMV, GEMM):
        for n, some in tiles.items():
            for what in MATRICES if n <= 64 else ("qkv", "attn_output"):
                for tile in some:
                    yield what, n, tile
    by_name = {"up": UP, "down_q6": DOWN, "down_q4": DOWN, "up_integers": TILES, "down_integers": TILES}
    for what, tiles in by_name.items():
        for n, some in tiles.items():
            for tile in some:
                yield what, n, tile
    for n, length in ((1, 256), (8, 4096)):
        for rest in [(64, 1, 4, 2), (128, 1, 4, 2), (64, 4, 4, 3)]:
            yield "decode_attention", n, (length, *rest)
    for n, length in ((1, 256), (1, 32_000), (8, 4096), (16, 8000), (64, 256), (256, 256)):
        yield "decode_attention", n, (length,)
    for n, start in ((512, 4000), (1000, 4000), (2048, 0), (8192, 0), (8192, 24_000)):
        for name, (_, portable) in PREFILL.items():
            for variant in ((1,), (0,), *((1, *tile) for tile in portable)):
                yield name, n, (start, *variant)


def run() -> None:
    last: tuple[Any, ...] = ()
    for what, n, tile in cases():
        try:
            launch, nbytes = case(what, n, tile)
            time = seconds(launch, 12 if n <= 64 else 3)
        except (RuntimeError, ValueError, OutOfResources) as error:  # a tile that does not fit the GPU
            print(f"{what} n={n} {tile}: {str(error)[:80]}", flush=True)
            continue
        if last != (what, n):
            print(f"{what} n={n}, memory floor {nbytes / BYTES_PER_S * 1e6:.1f} us:", flush=True)
        last = (what, n)
        print(f"    {tile!s:24} {time * 1e6:9.1f} us", flush=True)


def warm_up_cases() -> list[Case]:
    return list(cases())


def warm_up(what: str, n: int, tile: tuple[int, ...]) -> None:
    launch, _ = case(what, n, tile)
    launch(0)
    torch.cuda.synchronize()
