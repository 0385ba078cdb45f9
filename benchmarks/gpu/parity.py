"""Every kernel against float64 (or the sampling specification) on the GPU, on random inputs, at real shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.shape import SHAPE, random_planes, tensors
from benchmarks.gpu.warm_up import Task
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.planes import dequantize
from moeserve.kernels.quantize.reference import quantize
from moeserve.quantization import QUANT_TYPES
from moeserve.quantization import table as types

Result = list[tuple[str, float, float]]  # what, error, largest that is right


def error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|; NaN never passes."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def counter(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device="cuda")


def q8(x: Tensor) -> GpuActivations:
    q = quantize(x)
    return GpuActivations(x, q.codes, q.scales)


def through(x: GpuActivations) -> Tensor:
    assert x.codes is not None
    assert x.scales is not None
    return x.codes.double() * x.scales.double().repeat_interleave(32, dim=1)


def check_linear(kind: int) -> Result:
    from moeserve.kernels.embed.op import embed
    from moeserve.kernels.linear.op import GEMV_TOKENS, linear

    p = random_planes(QUANT_TYPES[kind], 1000, SHAPE.hidden)
    w, results = dequantize(p, 0), []
    for n in (1, 3, 8, 16, 50, 200):
        small_batch = n + 1 <= GEMV_TOKENS if p.quantised else n <= 4
        x = q8(torch.randn(n + 1, p.cols, device="cuda"))
        assert x.x is not None
        floats = x.x if small_batch else x.x.bfloat16()
        out = torch.full((n + 1, p.rows), math.nan, device="cuda")
        linear(floats, x.codes, x.scales, counter(n), tensors(p), kind, None, 0, p.cols, out)
        taken = through(x) if small_batch and p.quantised else floats.double()
        e = error(out[:n], taken[:n] @ w.double().T)
        assert out[n].isnan().all()
        results.append((f"linear {p.type.name} n={n}", e, 1e-6 if small_batch else 4e-3))
    rows = torch.full((4, p.cols), math.nan, device="cuda")
    ids = torch.randint(0, p.rows, (4,), dtype=torch.int32, device="cuda")
    embed(ids, counter(4), tensors(p), kind, rows)
    return [*results, (f"embed {p.type.name}", error(rows, w[ids.long()]), 1e-7)]


def check_experts(kinds: tuple[int, int, int], n: int) -> Result:
    from moeserve.kernels.experts.op import BlockWorkspace, align_routes, experts_down, experts_up
    from moeserve.kernels.experts.small_batch import small_batch_down, small_batch_up

    experts, top_k, hidden, ff = 16, 4, 512, 256
    gate, up = (random_planes(QUANT_TYPES[k], experts, ff, hidden, seed=i) for i, k in enumerate(kinds[:2]))
    down = random_planes(QUANT_TYPES[kinds[2]], experts, hidden, ff)
    workspace = BlockWorkspace(n, top_k, experts, "cuda")
    gemv = workspace.method.up is None
    x = q8(torch.randn(n, hidden, device="cuda") * 5)
    assert x.x is not None
    floats = x.x if gemv else x.x.bfloat16()
    ids = torch.rand(n, experts, device="cuda").argsort(1)[:, :top_k].int().contiguous()
    ids[0, 0] = -1
    as_int8 = gemv and down.quantised
    h = GpuActivations.empty(
        n * top_k, ff, "cuda", dtype=None if as_int8 else floats.dtype, quantised=as_int8
    )
    weights = torch.rand(n, top_k, device="cuda")
    matrices = (tensors(gate), kinds[0], tensors(up), kinds[1], hidden)
    if gemv:
        total = torch.full((n, hidden), math.nan, device="cuda")
        small_batch_up(floats, x.codes, x.scales, *matrices, ids, h.x, h.codes, h.scales)
        small_batch_down(h.x, h.codes, h.scales, tensors(down), kinds[2], ff, ids, weights, counter(n), total)
    else:
        assert h.x is not None
        parts = torch.zeros(n, top_k, hidden, device="cuda")
        align_routes(ids, counter(n), experts, workspace.expert, workspace.routes)
        experts_up(floats, *matrices, workspace.expert, workspace.routes, top_k, h.x)
        experts_down(h.x, tensors(down), kinds[2], ff, workspace.expert, workspace.routes, counter(n), parts)
        total = (parts * weights[..., None]).sum(1)
    expected = torch.zeros(n, hidden, dtype=torch.float64, device="cuda")
    for e in range(experts):
        token, j = torch.nonzero(ids == e, as_tuple=True)
        if not len(token):
            continue
        g, u, d = (dequantize(p, e).double() for p in (gate, up, down))
        into_g, into_u = (through(x) if gemv and p.quantised else floats.double() for p in (gate, up))
        y = torch.nn.functional.silu(into_g[token] @ g.T) * (into_u[token] @ u.T)
        y = through(q8(y.float())) if as_int8 else y
        expected.index_add_(0, token, (y @ d.T) * weights[token, j, None])
    names = "/".join(QUANT_TYPES[k].name for k in kinds)
    return [(f"experts {names} n={n}", error(total, expected), 3e-3 if gemv else 1e-2)]


def check_norm() -> Result:
    from moeserve.kernels.norm.op import add_norm
    from moeserve.kernels.norm.reference import norm
    from moeserve.kernels.routing.op import norm_router

    results = []
    for n, dtype in ((1, torch.float32), (300, torch.bfloat16)):
        x, parts = torch.randn(n, 2048, device="cuda"), torch.randn(n, 8, 2048, device="cuda")
        weights, weight = torch.rand(n, 8, device="cuda"), torch.rand(2048, device="cuda")
        ids = torch.randint(-1, 9, (n, 8), dtype=torch.int32, device="cuda")
        total = x.double() + (parts * (weights * (ids >= 0))[..., None]).double().sum(1)
        y, exact = GpuActivations.empty(n, 2048, "cuda", dtype=dtype, quantised=True), torch.empty_like(x)
        add_norm(x, parts, weights, ids, None, None, counter(n), weight, 1e-6, y.x, y.codes, y.scales, exact)
        expected = norm(total, weight, 1e-6)
        assert y.x is not None
        results += [
            (f"add_norm x n={n}", error(x, total), 1e-6),
            (f"add_norm y n={n} {dtype}", error(y.x, expected), 1e-6 if dtype == torch.float32 else 4e-3),
            (f"add_norm q8 n={n}", error(through(y), expected), 8e-3),
            (f"add_norm exact n={n}", error(exact, expected), 1e-6),
        ]
    for n in (1, 16):
        x, extra, router = (torch.randn(k, 2048, device="cuda") for k in (n, n, 128))
        y = GpuActivations.empty(n, 2048, "cuda", dtype=torch.float32, quantised=True)
        logits = torch.full((n, 128), math.nan, device="cuda")
        norm_router(x, extra, counter(n), weight, 1e-6, router, y.x, y.codes, y.scales, logits)
        expected = norm(x.double() + extra, weight, 1e-6)
        assert y.x is not None
        results += [
            (f"norm_router y n={n}", error(y.x, expected), 1e-6),
            (f"norm_router q8 n={n}", error(through(y), expected), 8e-3),
            (f"norm_router logits n={n}", error(logits, expected @ router.double().T), 1e-6),
        ]
    return results


def check_rope() -> Result:
    from moeserve.kernels.rope.op import rope_store
    from moeserve.kernels.rope.reference import rope_store as reference

    s, n = SHAPE, 37
    fused = torch.randn(n, (s.heads + 2 * s.kv_heads) * s.dim, device="cuda")
    q, k, v = fused.split([s.heads * s.dim, s.kv_heads * s.dim, s.kv_heads * s.dim], dim=1)
    q_norm, k_norm = torch.rand(s.dim, device="cuda"), torch.rand(s.dim, device="cuda")
    angles = torch.rand(500, s.dim // 2, device="cuda") * 6
    positions = torch.randint(0, 500, (n,), device="cuda").int()
    slots = torch.randperm(100, device="cuda")[:n].int()
    kv = torch.zeros(4, 100, s.kv_heads, s.dim, device="cuda", dtype=torch.float16)
    expected = reference(
        q.unflatten(1, (-1, s.dim)), k.unflatten(1, (-1, s.dim)), v.unflatten(1, (-1, s.dim)), q_norm, k_norm, 1e-6,
        angles.cos()[positions.long()], angles.sin()[positions.long()], slots, kv[0], kv[1],
    )  # fmt: skip
    q_out = torch.empty(n, s.heads, s.dim, device="cuda", dtype=torch.float16)
    cos, sin = angles.cos(), angles.sin()
    rope_store(q, k, v, q_norm, k_norm, 1e-6, cos, sin, positions, slots, counter(n), q_out, kv[2], kv[3])
    pairs = {"q": (q_out, expected), "keys": (kv[2], kv[0]), "values": (kv[3], kv[1])}
    return [(f"rope_store {name}", error(*pair), 5e-4) for name, pair in pairs.items()]


def check_attention() -> Result:
    from moeserve.kernels.attention.op import (
        DecodeWorkspace,
        decode_attention,
        prefill_attention,
        prefill_tiles,
    )
    from moeserve.kernels.attention.reference import Sequence, attention

    s, requests, length, results = SHAPE, 6, 3000, []
    slots = requests * length
    keys, values = (torch.randn(slots, s.kv_heads, s.dim, device="cuda").half() for _ in range(2))
    table = torch.randperm(slots, device="cuda").int().view(requests, length)
    lengths, pool = [3000, 1, 64, 65, 700, 2048], (keys.cpu(), values.cpu())
    for n in (1, 6):
        q = (torch.randn(n, s.heads, s.dim, device="cuda") / s.dim**0.5).half()
        rows = torch.arange(n, dtype=torch.int32, device="cuda")
        positions = torch.tensor(lengths[:n], dtype=torch.int32, device="cuda") - 1
        workspace = DecodeWorkspace(n, s.heads, s.kv_heads, s.dim, "cuda")
        out = GpuActivations.empty(n, s.heads * s.dim, "cuda", dtype=torch.float32, quantised=True)
        assert out.x is not None
        expected = attention(
            q.cpu(), *pool, [Sequence(i, 1, lengths[i] - 1, table[i].cpu()) for i in range(n)]
        ).cuda()
        for again in range(3):
            out.x.fill_(math.nan)
            decode_attention(
                q.flatten(1), None, keys, values, table, rows, positions, counter(n), workspace.sums, workspace.stats,
                workspace.counters, out.x, out.codes, out.scales,
            )  # fmt: skip
            results.append((f"decode attention n={n}, time {again}", error(out.x, expected), 1e-3))
        results.append((f"decode attention q8 n={n}", error(through(out), expected), 8e-3))
    results += check_new_tokens(keys.clone(), values.clone(), table, lengths)
    chunks = [(0, 300, 0, 0), (300, 1, 1999, 1), (301, 170, 900, 2), (471, 64, 64, 3)]
    first, count, position, request = np.array(chunks, np.int32).T
    tiles = prefill_tiles(first, count, position, request, s.heads, s.kv_heads, s.dim)
    q = (torch.randn(535, s.heads, s.dim, device="cuda") / s.dim**0.5).half()
    mixed = torch.full((535, s.heads * s.dim), math.nan, device="cuda", dtype=torch.bfloat16)
    prefill_attention(q, keys, values, table, torch.from_numpy(tiles).cuda(), mixed)
    expected = attention(q.cpu(), *pool, [Sequence(r, c, p, table[i].cpu()) for r, c, p, i in chunks]).cuda()
    return [*results, ("prefill attention", error(mixed, expected), 4e-3)]


def check_new_tokens(keys: Tensor, values: Tensor, table: Tensor, lengths: list[int]) -> Result:
    """Decode attention of tokens as projected, against the reference of both steps. Writes to keys and values."""
    from moeserve.kernels.attention.op import DecodeWorkspace, NewTokens, decode_attention
    from moeserve.kernels.attention.reference import Sequence, attention
    from moeserve.kernels.rope.reference import rope_store

    s, n = SHAPE, len(lengths)
    fused = torch.randn(n, (s.heads + 2 * s.kv_heads) * s.dim, device="cuda")
    q, k, v = fused.split([s.heads * s.dim, s.kv_heads * s.dim, s.kv_heads * s.dim], dim=1)
    q_norm, k_norm = torch.rand(2, s.dim, device="cuda")
    angles = torch.rand(max(lengths), s.dim // 2, device="cuda") * 6
    rows = torch.arange(n, dtype=torch.int32, device="cuda")
    positions = torch.tensor(lengths, dtype=torch.int32, device="cuda") - 1
    slots = table[rows.long(), positions.long()]
    cos, sin, pool = angles.cos(), angles.sin(), (keys.clone(), values.clone())
    heads = [t.unflatten(1, (-1, s.dim)) for t in (q, k, v)]
    of_rows = cos[positions.long()], sin[positions.long()]
    rotated = rope_store(heads[0], heads[1], heads[2], q_norm, k_norm, 1e-6, *of_rows, slots, *pool)
    sequences = [Sequence(i, 1, lengths[i] - 1, table[i].cpu()) for i in range(n)]
    expected = attention(
        rotated.cpu(), pool[0].cpu(), pool[1].cpu(), sequences
    ).cuda()  # fmt: skip
    workspace = DecodeWorkspace(n, s.heads, s.kv_heads, s.dim, "cuda")
    out = torch.full((n, s.heads * s.dim), math.nan, device="cuda")
    new = NewTokens(k, v, q_norm, k_norm, 1e-6, cos, sin, slots)
    torch.cuda.synchronize()
    decode_attention(
        q, new, keys, values, table, rows, positions, counter(n), workspace.sums, workspace.stats, workspace.counters,
        out, None, None,
    )  # fmt: skip
    pairs = {"": (out, expected), ", keys": (keys, pool[0]), ", values": (values, pool[1])}
    return [(f"attention of new tokens{name}", error(*pair), 1e-3) for name, pair in pairs.items()]


def check_routing() -> Result:
    from moeserve.kernels.experts.op import align_routes, num_blocks
    from moeserve.kernels.routing.op import route
    from moeserve.kernels.routing.reference import route as reference

    s, results = SHAPE, []
    for n in (1, 7, 64, 4096):
        logits = torch.randn(n, s.experts, device="cuda")
        ids = torch.empty(n, s.top_k, dtype=torch.int32, device="cuda")
        weights = torch.empty(n, s.top_k, device="cuda")
        expert_token_counts = torch.zeros(s.experts, dtype=torch.int64, device="cuda")
        route(logits, None, counter(n), ids, None, weights, expert_token_counts)
        expected_ids, expected = reference(logits, s.top_k)
        wrong = float((ids != expected_ids).sum() + (expert_token_counts.sum() != n * s.top_k))
        results += [
            (f"route ids n={n}", wrong, 0.0),
            (f"route weights n={n}", error(weights, expected), 1e-6),
        ]
        for block in (4, 16, 64, 128):
            blocks = num_blocks(n, s.top_k, s.experts, block)
            expert = torch.full((blocks,), -7, dtype=torch.int32, device="cuda")
            routes = torch.full((blocks, block), -7, dtype=torch.int32, device="cuda")
            align_routes(ids, counter(n), s.experts, expert, routes)
            kept = routes[expert >= 0]
            whole = kept[kept >= 0].sort().values
            bad = float(
                len(whole) != n * s.top_k or (whole != torch.arange(n * s.top_k, device="cuda")).any()
            )
            owner = expert[expert >= 0][:, None].expand_as(kept)[kept >= 0]
            bad += float((ids.view(-1)[kept[kept >= 0].long()] != owner).sum())
            results.append((f"align n={n} block={block}", bad, 0.0))
    return results


def check_sampling() -> Result:
    from moeserve.kernels.sampling import reference
    from moeserve.kernels.sampling.op import DeviceSamplerState, SamplingWorkspace, logprobs, sample
    from moeserve.kernels.sampling.reference import Params
    from moeserve.sampling.order import order_code
    from moeserve.sampling.parameters import PARAMETERS, SamplerSettings, settings_of

    vocab = SHAPE.vocab
    filters = [
        Params(temperature=0.0), Params(), Params(top_k=50), Params(top_p=0.9), Params(min_p=0.05),
        Params(top_k=20, top_p=0.95, temperature=0.6), Params(top_p=0.99, temperature=2.0), Params(top_k=3000),
        Params(top_n_sigma=1.0), Params(typical_p=0.7), Params(xtc_probability=1.0, xtc_threshold=0.01),
        Params(temperature=1.5, top_k=3000, top_p=0.9, order=("top_k", "top_p", "temperature")),
        Params(top_k=8, dry_multiplier=2.0, dry_allowed_length=1, prompt=(3, 5, 9) * 700 + (3, 5)),
    ]  # fmt: skip
    params = [p for p in filters for _ in range(4)]
    n, rng = len(params), np.random.default_rng(0)
    logits = torch.randn(n, vocab, device="cuda") * 3
    state, workspace = DeviceSamplerState(n, vocab, "cuda"), SamplingWorkspace(n, vocab, "cuda")
    seeds = rng.integers(0, 2**64, n, dtype=np.uint64)
    for i, p in enumerate(params):
        settings = SamplerSettings(**{name: getattr(p, name) for name in PARAMETERS})
        state.bind(
            i, **settings_of(settings), seed=int(seeds[i]), order=order_code(settings, p.order), max_tokens=9,
            prompt=np.array(p.prompt, np.int32),
        )  # fmt: skip
    tokens = torch.full((n,), -7, dtype=torch.int32, device="cuda")
    slots = torch.arange(n, dtype=torch.int32, device="cuda")
    sample(
        logits, slots, counter(n), state.params, state.bias_ids, state.bias_values, state.stop_ids, state.history, None,
        workspace.edited, workspace.block_max, workspace.block_sum, workspace.values, workspace.ids, tokens,
        has_chains=True,
    )  # fmt: skip
    rows = logits.cpu()
    expected = [reference.sample(rows[i], replace(p, seed=int(seeds[i]))) for i, p in enumerate(params)]
    wrong = [i for i in range(n) if tokens[i].item() != expected[i]]
    results: Result = [(f"sample: {len(wrong)} of {n} tokens differ {wrong}", float(len(wrong)), 1.0)]
    lp, ranks = torch.zeros(n, device="cuda"), torch.zeros(n, dtype=torch.int32, device="cuda")
    ids, values = torch.zeros(n, 20, dtype=torch.int32, device="cuda"), torch.zeros(n, 20, device="cuda")
    logprobs(
        logits,
        tokens,
        counter(n),
        workspace.block_max,
        workspace.block_sum,
        workspace.values,
        workspace.ids,
        lp,
        ranks,
        ids,
        values,
    )
    exact = logits.double().log_softmax(1)
    top = logits.sort(dim=1, descending=True, stable=True).indices[:, :20]
    mine = exact.gather(1, tokens.long()[:, None])
    results.append(("logprobs", float((lp.double() - mine[:, 0]).abs().max()), 1e-5))
    results.append(("top logprobs", float((values.double() - exact.gather(1, top)).abs().max()), 1e-5))
    wrong_ids = (ids != top).sum() + (
        ranks != 1 + (logits > logits.gather(1, tokens.long()[:, None])).sum(1)
    ).sum()
    return [*results, ("top ids and ranks", float(wrong_ids), 0.0)]


def cases() -> Iterator[Task]:
    for kind in QUANT_TYPES:
        yield "parity", "check_linear", (int(kind),)
    g = types
    mixes = [
        (g.Q4_K, g.Q4_K, g.Q6_K),
        (g.Q5_0, g.Q8_0, g.IQ4_NL),
        (g.F16, g.Q3_K, g.BF16),
        (g.MXFP4, g.MXFP4, g.MXFP4),
    ]
    for mix in mixes:
        for n in (1, 8, 40, 600, 3000):
            yield "parity", "check_experts", (tuple(int(k) for k in mix), n)
    for name in (
        "check_norm",
        "check_rope",
        "check_attention",
        "check_routing",
        "check_sampling",
    ):
        yield "parity", name, ()


def report(results: dict[Task, Result | str]) -> None:
    checked = failed = 0
    for task, result in results.items():
        if isinstance(result, str):
            failed += 1
            print(f"FAILED {task[1:]}: {result}", flush=True)
            continue
        for what, e, largest in result:
            checked += 1
            if not e <= largest:
                failed += 1
                print(f"WRONG {what}: {e:.2e}, at most {largest:.0e}", flush=True)
    print(f"parity: {checked} checks, {failed} failed", flush=True)
