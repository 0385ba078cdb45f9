"""What works on each row by itself, or moves rows: norms, routers, sampling, sums over GPUs, copies."""

from __future__ import annotations

import torch

from moeserve.kernels import launch
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.new_tokens import NewTokens
from moeserve.kernels.collectives.push import BLOCK, MAX_NUMBERS, push_sum_kernel
from moeserve.kernels.collectives.sum_norm_op import MessageSize, SumNorm
from moeserve.kernels.embed.op import KvPlaces, embed
from moeserve.kernels.experts.op import shared_gate
from moeserve.kernels.experts.sum_parts import sum_parts
from moeserve.kernels.experts.weigh_input import weigh_input
from moeserve.kernels.handoff.fetch import FetchLayer, choose_fetched
from moeserve.kernels.handoff.triton import combine_kernel, poll_kernel, publish_kernel
from moeserve.kernels.linear.softcap import softcap
from moeserve.kernels.norm.op import add_norm, sandwich_inputs, sandwich_sum
from moeserve.kernels.norm.sandwich_norms import PartNorms, SandwichNorms
from moeserve.kernels.operators import pointwise as pw
from moeserve.kernels.pages.op import PageRows
from moeserve.kernels.planes.copies import copy_scattered, store_scattered
from moeserve.kernels.rope.op import rope_store
from moeserve.kernels.routing.op import norm_router, route, select_streamed_routes
from moeserve.kernels.routing.options import RouterOptions
from moeserve.kernels.sampling.op import DeviceSamplerState, SamplingWorkspace, logprobs, sample
from moeserve.kernels.tower import op as tower_ops
from moeserve.kernels.tower.attention import attention as tower_attention
from moeserve.quantization.quant_type import QuantType
from tests.support.measuring.gpu_operators.attention import decode, prefill
from tests.support.measuring.gpu_operators.tensors import both, empty, f32, i32, weight


def rows(n: int, kind: QuantType) -> None:
    count, at = empty(1, dtype=i32), empty(n, dtype=i32)
    embed(
        at,
        count,
        weight(kind, 9, 256),
        int(kind),
        empty(n, 256),
        KvPlaces(empty(3, 64, dtype=i32), at, at, at),
    )
    table = empty(3, 64, dtype=i32)
    embed(at, count, weight(kind, 9, 256), int(kind), empty(n, 256), KvPlaces(table, at, at, at, table, at))
    ids = empty(n, 8, dtype=i32)
    add_norm(
        empty(n, 256),
        empty(n, 8, 256),
        empty(n, 8),
        ids,
        empty(n, 256),
        None,
        count,
        empty(256),
        1e-6,
        *both(n, 256),
        empty(n, 256),
    )
    route(empty(n, 128), empty(128, dtype=i32), count, ids, ids, empty(n, 8), empty(128, dtype=i32))
    norm_router(
        empty(n, 256), empty(n, 256), count, empty(256), 1e-6, empty(128, 256), *both(n, 256), empty(n, 128)
    )
    rotate_and_store(n, 128, empty(128), empty(128))


def rotate_and_store(n: int, rotary: int, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None) -> None:
    heads, kv_heads, dim, at = 32, 4, 128, empty(n, dtype=i32)
    k, angles = empty(n, kv_heads * dim), empty(9, rotary // 2)
    pool = empty(50, kv_heads, dim, dtype=torch.float16)
    rope_store(
        empty(n, heads * dim),
        k,
        k,
        q_norm,
        k_norm,
        1e-6,
        angles,
        angles,
        at,
        at,
        empty(1, dtype=i32),
        empty(n, heads, dim, dtype=torch.float16),
        pool,
        pool,
    )


def sandwiched(n: int) -> None:
    count, wide, at = empty(1, dtype=i32), 2816, empty(n, dtype=i32)
    x, w = empty(n, wide), empty(wide)
    norms = SandwichNorms(w, w, w, PartNorms(w, w, w, w), empty(1))
    y = GpuActivations(*both(n, wide))
    sandwich_inputs(
        x, x, norms, count, 1e-6, y, x, GpuActivations(empty(n, wide, dtype=torch.bfloat16), None, None)
    )
    parts = empty(n, 9, wide, dtype=torch.bfloat16)
    weights, ids = empty(n, 9)[:, :8], empty(n, 9, dtype=i32)[:, :8]
    sandwich_sum(x, parts[:, 8:], parts[:, :8], weights, ids, x, None, count, norms, empty(wide), 1e-6, y)
    sandwich_sum(x, empty(n, 1, wide), None, None, None, x, at, count, norms, empty(wide), 1e-6, y)
    route(empty(n, 128), None, count, ids, None, weights, None, expert_scale=empty(128))
    softcap(empty(n, 262144), 30.0)
    angles = empty(64, 256)
    for heads, kv_heads, dim in ((16, 2, 512), (16, 8, 256)):
        q, k = empty(n, heads * dim), empty(n, kv_heads * dim)
        pool = empty(50, kv_heads, dim, dtype=torch.float16)
        rotated = empty(n, heads, dim, dtype=torch.float16)
        of_dim = (
            empty(dim),
            empty(dim),
            1e-6,
            angles[:, : dim // 2].contiguous(),
            angles[:, : dim // 2].contiguous(),
        )
        rope_store(q, k, k, *of_dim, at, at, count, rotated, pool, pool, v_eps=1e-6)
        decode(
            n, heads, pool, NewTokens(k, k, *of_dim, at, 1e-6), window=1024 if dim == 256 else 0, scale=1.0
        )
        prefill(n, heads, pool, scale=1.0)


def rows_of_others(n: int) -> None:
    count, wide = empty(1, dtype=i32), empty(n, 9, dtype=i32)
    ids, weights = wide[:, :8], empty(n, 9)[:, :8]
    for options in (
        RouterOptions("sigmoid", scale=2.5, groups=8, top_groups=4),
        RouterOptions("softmax_topk"),
        RouterOptions("softmax", normalize=False),
    ):
        route(
            empty(n, 128),
            empty(128, dtype=i32),
            count,
            ids,
            ids,
            weights,
            None,
            options=options,
            bias=empty(128),
        )
        route(empty(n, 128), None, count, ids, None, weights, None, options=options)
    select_streamed_routes(ids, empty(128, dtype=i32), ids, ids)
    shared_gate(empty(n, 256), empty(256), count, empty(n, 9)[:, 8], wide[:, 8])
    shared_gate(empty(n, 256), None, count, empty(n, 9)[:, 8])
    weigh_input(empty(n, 5120), weights[:, :1], count, GpuActivations(*both(n, 5120)), empty(n, 1))
    norm_router(
        empty(n, 256),
        empty(n, 256),
        count,
        empty(256),
        1e-6,
        empty(128, 256),
        *both(n, 256),
        empty(n, 128),
        bias=empty(128),
    )
    rotate_and_store(n, 64, None, None)
    rotate_and_store(n, 128, empty(32 * 128), empty(4 * 128))
    rotate_and_store(n, 32, empty(128), None)


def sampling(n: int) -> None:
    vocab, at, count = 5000, empty(n, dtype=i32), empty(1, dtype=i32)
    s, r = DeviceSamplerState(n, vocab, "meta"), SamplingWorkspace(n, vocab, "meta")
    state = (s.params, s.bias_ids, s.bias_values, s.stop_ids, s.history)
    room = (r.block_max, r.block_sum, r.values, r.ids)
    for mask in (None, empty(n, 157, dtype=i32)):
        for has_chains in (False, True):
            sample(empty(n, vocab), at, count, *state, mask, r.edited, *room, at, has_chains=has_chains)
    sample(empty(n, vocab), at, count, *state, None, None, *room, at)
    logprobs(empty(n, vocab), at, count, *room, empty(n), at, empty(n, 20, dtype=i32), empty(n, 20))


def pointwise_kernels() -> None:
    every = pw.pointwise(
        lambda x, y, s: pw.where(pw.minimum(x, s) > y, pw.tanh(x) * pw.erf(y), pw.rsqrt(abs(y)) + s)
    )
    chain = pw.pointwise(lambda x, y: (x & y).to(torch.float32) / 3)
    for dtype in (torch.float16, torch.bfloat16, f32, torch.float64, i32):
        every.launch(empty(7, 40, dtype=dtype), empty(40, dtype=dtype), 0.5)
        every.launch(empty(7, 3, 40, dtype=dtype).transpose(0, 2), empty(1, 3, 1), 2)
    chain.launch(empty(5000, dtype=torch.bool), empty(5000, dtype=torch.uint8))
    chain.launch(empty(1, dtype=torch.int16)[0], empty(1, dtype=torch.int64)[0])
    every.launch(empty(1 << 17, 1 << 15), empty(1 << 17, 1), True)


def over_gpus(dtype: torch.dtype) -> None:
    inbox, peers = empty(2, 4, MAX_NUMBERS, dtype=torch.int64), empty(4, dtype=torch.int64)
    for polls in (0, 1000):
        push_sum_kernel(
            (4,),
            empty(2048, dtype=dtype),
            inbox,
            peers,
            empty(256, dtype=i32),
            2048,
            1,
            4,
            MAX_NUMBERS,
            polls,
            BLOCK,
            launch.PDL,
            num_warps=4,
            launch_pdl=launch.PDL,
        )
    sum_parts(
        empty(40, 8, 2048, dtype=dtype),
        empty(40, 8),
        empty(40, 8, dtype=i32),
        empty(1, dtype=i32),
        empty(40, 1, 2048, dtype=dtype),
    )
    size = MessageSize(4, 200, 2048, 128)
    sums = SumNorm(1, size, empty(size.region_bytes, dtype=torch.uint8), [0] * 4)
    for is_trial in (False, True):
        sums.trial(is_trial)
        for rows in (2, 200):
            own, x = empty(rows, 1, 2048, dtype=f32 if rows < 64 else torch.bfloat16), empty(rows, 2048)
            one = empty(1, dtype=i32)
            sums.add_norm(
                own,
                x,
                one,
                empty(2048),
                1e-6,
                GpuActivations(*both(rows, 2048)),
                empty(rows, 2048),
                attended=x,
            )
        sums.norm_router(
            empty(2, 1, 2048),
            x[:2],
            one,
            empty(2048),
            1e-6,
            empty(128, 2048),
            GpuActivations(*both(2, 2048)),
            empty(2, 128),
        )


def promotions() -> None:
    copy_scattered(empty(19, 3, dtype=torch.int64))
    store_scattered(empty(48, 128, dtype=i32), empty(7, 2, dtype=torch.int64))
    for experts in (128, 512):
        map_of, (copies, addresses) = empty(experts, dtype=i32), empty(2, 49, 4, dtype=torch.int64)
        layer = FetchLayer(
            map_of, map_of, empty(experts), copies, copies, addresses, empty(2, dtype=i32)
        )  # fmt: skip
        ids = empty(8, 8, dtype=i32)
        choose_fetched(ids, ids, layer, empty(2, dtype=i32), empty(3, experts, dtype=i32), empty(16, 64), 0.9)


def hand_off(n: int) -> None:
    x, ids = empty(n, 2048), empty(n, 8, dtype=i32)
    word, long, flags = empty(4, dtype=i32), empty(2, dtype=torch.int64), empty(n, dtype=i32)
    codes, metas = empty(n, 3072, dtype=torch.int8), empty(n, 768, dtype=i32)
    for on_gpu in (None, ids):
        publish_kernel(
            (n,),
            x,
            ids,
            empty(n, 8),
            empty(128, dtype=i32),
            on_gpu,
            codes,
            metas,
            None,
            ids,
            empty(n, 8),
            long,
            word,
            word,
            long,
            flags,
            word,
            2048,
            8,
            8,
            2048,
            8,
            launch.PDL,
            num_warps=8,
            enable_fp_fusion=False,
        )
    poll_kernel((1,), word, word, word, word, launch.PDL, num_warps=1)
    combine_kernel((n,), x, flags, x, 2048, 2048, launch.PDL, num_warps=8)


def tower(n: int, approximate: str) -> None:
    """The operations of a layer with n patches, in Qwen3.6's sizes."""
    x, half = empty(n, 1152), torch.float16
    tower_ops.layer_norm(x, empty(1152), empty(1152), 1e-6, half, is_exact=True)
    tower_ops.layer_norm(x, empty(1152), empty(1152), 1e-6, half)
    turns, product, bias = (empty(n, 36), empty(n, 36)), empty(n, 3456), empty(3456)
    tower_ops.split_heads(product, empty(n, 3456), bias, turns, 16, half)
    tower_ops.split_heads(product, None, None, None, 16, half)
    if launch.warpgroups():
        tower_attention(empty(3, n, 16, 72, dtype=half))
    tower_ops.gelu(empty(n, 4304), empty(4304), approximate, half)
    tower_ops.add_product(x, empty(n, 1152), empty(1152))


def pages(size: int) -> None:
    rows = PageRows([empty(40, size, dtype=torch.uint8)] * 2, 4)
    for move in (rows.gather, rows.scatter):
        move(empty(8, dtype=torch.int64), empty(2, 8 * size, dtype=torch.uint8))
