"""Each kernel at the shape of Qwen3-30B-A3B by itself, in a CUDA graph over several weights, which the cache does not
hold all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.layer import Q4, Q6, LayerWorkspace, product, sums_of
from benchmarks.gpu.prefill import batch_of as prefill_batch
from benchmarks.gpu.shape import SHAPE, random_planes, report, seconds, tensors
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.new_tokens import NewTokens
from moeserve.kernels.attention.op import decode_attention, prefill_attention
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.experts.op import align_routes, experts_down, experts_up
from moeserve.kernels.experts.small_batch import small_batch_down, small_batch_up
from moeserve.kernels.norm.op import add_norm
from moeserve.kernels.planes import Planes
from moeserve.kernels.rope.op import rope_store
from moeserve.kernels.routing.op import route
from moeserve.kernels.sampling.op import DeviceSamplerState, SamplingWorkspace, sample
from moeserve.quantization.table import F32
from moeserve.sampling.order import order_code
from moeserve.sampling.parameters import SamplerSettings

BATCHES = (1, 8, 64, 512, 2048, 8192)
LAUNCHES = 12
Matrices = tuple[list[Tensor], int, list[Tensor], int, int]  # of gate and up, their types, their columns


def cached(rows: int) -> int:
    """How many times to repeat: long enough to time."""
    return LAUNCHES if rows <= 64 else 3


def dense(n: int) -> None:
    s, workspace = SHAPE, LayerWorkspace(n, decode=False)
    fill(workspace)
    matrices = {"qkv": (Q4, 5120, 2048), "attn_output": (Q4, 2048, 4096), "router": (F32, 128, 2048)}
    if n <= 64:
        matrices["head"] = (Q6, s.vocab, s.hidden)
    for name, (kind, rows, cols) in matrices.items():
        copies = [random_planes(kind, rows, cols, seed=i) for i in range(1 if name == "head" else 12)]
        x = workspace.attended if name == "attn_output" else workspace.y
        if name == "router":
            x = GpuActivations(workspace.router_input, None, None)
        out = torch.empty(n, rows, device="cuda")
        time = seconds(lambda i: product(x, workspace, copies[i % len(copies)], out), cached(n))  # noqa: B023
        report(f"{name} n={n}", time, copies[0].nbytes + n * (rows + cols) * 4, 2.0 * n * rows * cols)


def fill(workspace: LayerWorkspace) -> None:
    for a in (workspace.y, workspace.attended, workspace.h):
        for t in (a.x, a.scales):
            if t is not None:
                t.normal_()
        if a.codes is not None:
            a.codes.random_(-127, 128)


def experts(n: int) -> None:
    s, r = SHAPE, LayerWorkspace(n, decode=False)
    fill(r)
    gate, up = (random_planes(Q4, s.experts, s.ff, s.hidden, seed=i) for i in (0, 1))
    down = random_planes(Q6, s.experts, s.hidden, s.ff)
    logits = [torch.randn(n, s.experts, device="cuda") for _ in range(4)]
    all_ids = [x.topk(s.top_k, 1).indices.int().contiguous() for x in logits]
    time = seconds(lambda i: route(logits[i % 4], None, r.count, r.ids, None, r.weights, None), cached(n))
    report(f"route n={n}", time, n * (s.experts + 2 * s.top_k) * 4)
    if r.blocks.method.block > 1:
        b = r.blocks
        time = seconds(
            lambda i: align_routes(all_ids[i % 4], r.count, s.experts, b.expert, b.routes), cached(n)
        )
        report(f"align n={n}", time, n * s.top_k * 8)
    distinct = sum(len(ids.unique()) for ids in all_ids) / 4 / s.experts
    flops = 2.0 * n * s.top_k * s.ff * s.hidden
    matrices = (tensors(gate), int(Q4), tensors(up), int(Q4), s.hidden)
    run_up, run_down = experts_launches(r, matrices, down, all_ids)
    time = seconds(run_up, cached(n))
    report(f"experts gate, up, silu n={n}", time, 2 * gate.nbytes * distinct, 2 * flops)
    time = seconds(run_down, cached(n))
    report(f"experts down (Q6_K) n={n}", time, down.nbytes * distinct, flops)
    ones = torch.ones(s.hidden, device="cuda")
    time = seconds(
        lambda i: add_norm(
            r.x, *sums_of(r), None, r.count, ones, s.eps, r.y.x, r.y.codes, r.y.scales,
        ),
        cached(n),
    )  # fmt: skip
    parts = r.parts.shape[1]
    report(f"add_norm of {parts} parts n={n}", time, n * s.hidden * (parts * r.parts.element_size() + 12))


def experts_launches(
    r: LayerWorkspace, matrices: Matrices, down: Planes, ids: list[Tensor]
) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """Gate and up, and down, over several routings."""
    s, b, of_down = SHAPE, r.blocks, (tensors(down), int(Q6), SHAPE.ff)
    h = r.h
    if r.uses_gemv:
        out = r.parts.view(r.n, -1)
        return (
            lambda i: small_batch_up(
                r.y.x, r.y.codes, r.y.scales, *matrices, ids[i % 4], h.x, h.codes, h.scales
            ),
            lambda i: small_batch_down(h.x, h.codes, h.scales, *of_down, ids[i % 4], r.weights, r.count, out),
        )
    blocks: list[tuple[Tensor, Tensor]] = []
    for some in ids:
        align_routes(some, r.count, s.experts, b.expert, b.routes)
        blocks.append((b.expert.clone(), b.routes.clone()))
    assert r.y.x is not None
    assert h.x is not None
    x, hidden = r.y.x, h.x
    return (
        lambda i: experts_up(x, *matrices, *blocks[i % 4], s.top_k, hidden),
        lambda i: experts_down(hidden, *of_down, *blocks[i % 4], r.count, r.parts),
    )


def rope(n: int) -> None:
    s, r = SHAPE, LayerWorkspace(n, decode=False)
    batch = prefill_batch(n)
    keys = torch.empty(n, s.kv_heads, s.dim, dtype=torch.float16, device="cuda")
    q_cols, kv_cols = s.heads * s.dim, s.kv_heads * s.dim
    r.projected.normal_()
    q, k, v = r.projected.split([q_cols, kv_cols, kv_cols], dim=1)
    ones = torch.ones(s.dim, device="cuda")
    values = torch.empty_like(keys)
    time = seconds(
        lambda i: rope_store(
            q, k, v, ones, ones, s.eps, batch.cos, batch.sin, batch.positions, batch.slots, r.count, r.q, keys, values,
        ),
        cached(n),
    )  # fmt: skip
    report(
        f"rope_store n={n}", time, n * ((q_cols + 2 * kv_cols) * (r.projected.element_size() + 2) + s.dim * 4)
    )


def attention_decode(n: int, length: int) -> None:
    s = SHAPE
    slots = n * length
    pools = [
        torch.randn(2, slots, s.kv_heads, s.dim, device="cuda").half()
        for _ in range(max(2, 1 + (1 << 26) // (slots << 11)))
    ]
    table = torch.arange(slots, dtype=torch.int32, device="cuda").view(n, length)
    rows = torch.arange(n, dtype=torch.int32, device="cuda")
    positions = torch.full((n,), length - 1, dtype=torch.int32, device="cuda")
    fused = torch.randn(n, (s.heads + 2 * s.kv_heads) * s.dim, device="cuda")
    q, k, v = fused.split([s.heads * s.dim, s.kv_heads * s.dim, s.kv_heads * s.dim], dim=1)
    ones, angles = torch.ones(s.dim, device="cuda"), torch.rand(length, s.dim // 2, device="cuda")
    new = NewTokens(k, v, ones, ones, s.eps, angles.cos(), angles.sin(), table[:, -1].contiguous())
    workspace = DecodeWorkspace(n, s.heads, s.kv_heads, s.dim, "cuda")
    out = GpuActivations.empty(n, s.heads * s.dim, "cuda", dtype=torch.float32, quantised=False)
    count = torch.tensor([n], dtype=torch.int32, device="cuda")

    def launch(i: int) -> None:
        keys, values = pools[i % len(pools)]
        decode_attention(
            q, new, keys, values, table, rows, positions, count, workspace, out.x, None, None,
        )  # fmt: skip

    bytes = 2.0 * slots * s.kv_heads * s.dim * 2
    report(
        f"norm, RoPE, KV, decode attention n={n} length={length}",
        seconds(launch, LAUNCHES),
        bytes,
        4.0 * slots * s.heads * s.dim,
    )


def attention_prefill(n: int) -> None:
    s, batch = SHAPE, prefill_batch(n)
    keys, values = (torch.randn(n, s.kv_heads, s.dim, device="cuda").half() for _ in range(2))
    q = torch.randn(n, s.heads, s.dim, device="cuda").half() / 11
    out = torch.empty(n, s.heads * s.dim, device="cuda", dtype=torch.bfloat16)
    assert batch.tiles is not None
    tiles = batch.tiles
    time = seconds(lambda i: prefill_attention(q, keys, values, batch.table, tiles, out), 3)
    report(f"prefill attention n={n}", time, 4.0 * n * s.heads * s.dim, 2.0 * n * n * s.heads * s.dim)


def sampling(n: int) -> None:
    vocab = SHAPE.vocab
    logits = torch.randn(n, vocab, device="cuda") * 3
    count = torch.tensor([n], dtype=torch.int32, device="cuda")
    slots = torch.arange(n, dtype=torch.int32, device="cuda")
    workspace, tokens = SamplingWorkspace(n, vocab, "cuda"), torch.empty(n, dtype=torch.int32, device="cuda")
    filters: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {},
        "top_k=50": {"top_k": 50},
        "top_k=20 top_p=0.95": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
        "top_p=0.9": {"top_p": 0.9},
        "min_p=0.05": {"min_p": 0.05},
        "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        "typical_p=0.9": {"typical_p": 0.9},
        "top_n_sigma=1": {"top_n_sigma": 1.0},
        "dry": {"dry_multiplier": 0.8},
    }
    text = np.random.default_rng(0).integers(0, 1000, 4096).astype(np.int32)
    for name, values in filters.items():
        state = DeviceSamplerState(n, vocab, "cuda", 0)
        for slot in range(n):
            code = order_code(SamplerSettings(**values))
            state.bind(slot, seed=slot, order=code, prompt=text, max_tokens=1 << 14, **values)
        has_chains = bool(state.chains)
        edited = workspace.edited if has_chains else None
        time = seconds(
            lambda i: sample(
                logits, slots, count, state.params, state.bias_ids, state.bias_values, state.stop_ids, state.history,  # noqa: B023
                None, edited, workspace.block_max, workspace.block_sum, workspace.values, workspace.ids, tokens,  # noqa: B023
                has_chains=has_chains,  # noqa: B023
            ),
            4,
        )  # fmt: skip
        report(f"sample {name} n={n}", time, n * vocab * 4)


def run() -> None:
    for name, arguments in warm_up_cases():
        globals()[name](*arguments)


def warm_up_cases() -> list[tuple[str, tuple[int, ...]]]:
    cases: list[tuple[str, tuple[int, ...]]] = []
    for n in BATCHES:
        cases += [("dense", (n,)), ("experts", (n,)), ("rope", (n,))]
    cases += [("attention_decode", (n, length)) for n in (1, 8, 64) for length in (256, 4096)]
    cases += [("attention_prefill", (n,)) for n in (512, 2048, 8192)]
    cases += [("sampling", (n,)) for n in (1, 64)]
    return cases


def warm_up(name: str, arguments: tuple[int, ...]) -> None:
    global report
    report = lambda *_: None  # noqa: E731
    globals()[name](*arguments)
