"""Code for a process of its own that compiles for a GPU what its first argument launches (test_triton_compile.py). The
second: its compute capability, 90 (Hopper) if there is none."""

from __future__ import annotations

SCRIPT = """
import sys, torch, triton
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
import moeserve.kernels.launch as launch

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int8: "i8",
         torch.float8_e4m3fn: "fp8e4nv", torch.int64: "i64", torch.uint8: "u8", torch.float64: "fp64",
         torch.bool: "i1", torch.int16: "i16"}

TARGET = int(sys.argv[2]) if len(sys.argv) > 2 else 90
SHARED = {80: 166_912, 89: 101_376, 90: 232_448, 120: 101_376}[TARGET]  # bytes that a program may have

def compile_for_gpu(kernel, grid, *arguments, **options):
    signature, constants, aligned = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.function.params, arguments, strict=True)):
        name = parameter.name
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + NAMES[value.dtype]
            aligned[(i,)] = [["tt.divisibility", 16]]
        elif value is not None and not parameter.is_constexpr:  # the pointwise kernels' numbers, sizes and strides
            signature[name] = parameter.annotation_type or {int: "i32"}[type(value)]
        else:
            signature[name], constants[name] = "constexpr", value
    source = ASTSource(kernel.function, signature, constants, aligned)
    for stages in range(options.get("num_stages", launch.DEFAULT_STAGES), 0, -1):  # as Kernel.with_fewer_stages
        compiled = compile(source, target=GPUTarget("cuda", TARGET, 32), options=options | {"num_stages": stages})
        if compiled.metadata.shared <= SHARED:
            break
    narrow = compiled.asm["ptx"].count("ld.global.b16")  # reads of 2 bytes
    single = compiled.asm["ptx"].count("cvt.rn.f16.s")  # conversions of one integer to float16
    pairs = compiled.asm["ptx"].count("fma.rn.bf16x2") + compiled.asm["ptx"].count("mul.rn.bf16x2")
    waits = compiled.asm["ptx"].count("wgmma.wait_group.sync.aligned 0")  # for all products under way
    print(kernel.function.__name__, compiled.metadata.shared, narrow, single, pairs, waits, flush=True)
    assert compiled.metadata.shared <= SHARED, "more shared memory than a block has"

launch.Kernel.launch = lambda kernel, kind, grid, arguments, options: compile_for_gpu(
    kernel, grid, *arguments, **options)
launch.PDL = TARGET >= 90
triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", TARGET, 32)))
launch.shared_memory = lambda: SHARED
"""
OPERATORS = """
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.collectives.push import BLOCK, MAX_NUMBERS, push_sum_kernel
from moeserve.kernels.collectives.sum_norm_op import MessageSize, SumNorm
from moeserve.kernels.experts.sum_parts import sum_parts
from moeserve.kernels.attention.op import DecodeWorkspace, NewTokens, decode_attention, prefill_attention
from moeserve.kernels.delta_net import op as delta
from moeserve.kernels.delta_net.heads import DeltaHeads
from moeserve.kernels.embed.op import KvPlaces, embed
from moeserve.kernels.experts.op import BlockWorkspace, align_routes, experts_down, experts_up, shared_gate
from moeserve.kernels.experts.large_batch import large_batch_down, large_batch_up
from moeserve.kernels.experts.quads import QuadWorkspace, quad_order, quads_down, quads_up
from moeserve.kernels.experts.small_batch import small_batch_down, small_batch_up
from moeserve.kernels.latent import op as latent
from moeserve.kernels.linear import op
from moeserve.kernels.linear.large_batch import UnpackScratch, large_batch_linear
from moeserve.kernels.lora import op as lora
from moeserve.kernels.norm.op import add_norm, sandwich_inputs, sandwich_sum
from moeserve.kernels.norm.sandwich_norms import SandwichNorms
from moeserve.kernels.pages.op import PageRows
from moeserve.kernels.handoff.triton import combine_kernel, poll_kernel, publish_kernel
from moeserve.kernels.planes import empty_planes
from moeserve.kernels.planes.copies import copy_scattered, store_scattered
from moeserve.kernels.planes.from_panels import PanelLayout
from moeserve.kernels.planes.panels_triton import unpack_panels, unpack_scattered
from moeserve.kernels.pointwise.library import softcap
from moeserve.kernels.rope.op import rope_store
from moeserve.kernels.routing.op import norm_router, route, select_streamed_routes
from moeserve.kernels.routing.options import RouterOptions
from moeserve.kernels.sampling.op import DeviceSamplerState, SamplingWorkspace, logprobs, sample

from moeserve.quantization.table import BF16, F32, IQ4_XS, MXFP4, Q3_K, Q4_K, Q5_K, Q6_K, Q8_0

Q4, Q6, IQ4 = Q4_K, Q6_K, IQ4_XS
f32, i32 = torch.float32, torch.int32

def empty(*shape, dtype=f32):
    return torch.empty(shape, dtype=dtype, device="meta")

def weight(kind, *shape):
    p = empty_planes(kind, shape, "meta")
    return [p.codes, p.scales, p.supers]

def both(n, cols, dtype=f32):
    a = GpuActivations.empty(n, cols, "meta", dtype=dtype, quantised=True)
    return a.x, a.codes, a.scales

def linear(n, kind, cols, rows, second, second_rows, bias=False):
    x = both(n, cols, f32 if n <= op.GEMV_TOKENS else torch.bfloat16)
    other = None if second is None else weight(second, second_rows, cols)
    op.linear(*x, empty(1, dtype=i32), weight(kind, rows, cols), int(kind), other, int(second or 0), cols,
              empty(n, rows + second_rows), bias=empty(rows + second_rows) if bias else None)

# A router of bfloat16.
def exact(n):
    op.linear(empty(n, 512), None, None, empty(1, dtype=i32), weight(BF16, 128, 512), int(BF16), None, 0,
                512, empty(n, 128))

def experts(n, kind, down, experts=128, top_k=8, oai=False, activation="silu"):
    hidden, ff, wide = 512, 256, top_k + 1 if experts == 1 else top_k
    room, ids = BlockWorkspace(n, top_k, experts, "meta"), empty(n, wide, dtype=i32)[:, :top_k]
    count, few = empty(1, dtype=i32), room.method.up is None
    dtype = f32 if few else torch.bfloat16
    gate, half = weight(kind, experts, ff, hidden), empty(n * top_k, ff, dtype=dtype)
    biases = [empty(experts, size) if oai else None for size in (ff, ff, hidden)]
    options = op.Gated("swiglu_oai" if oai else activation, *biases[:2])
    if few:
        h = both(n * top_k, ff, dtype)
        small_batch_up(*both(n, hidden, dtype), gate, int(kind), gate, int(kind), hidden, ids, *h, options=options)
        small_batch_down(*h, weight(down, experts, hidden, ff), int(down), ff, ids, empty(n, wide)[:, :top_k], count,
                         empty(n, hidden), bias=biases[2])
        return
    align_routes(ids, count, experts, room.expert, room.routes)
    experts_up(empty(n, hidden, dtype=dtype), gate, int(kind), gate, int(kind), hidden, room.expert, room.routes, top_k,
               half, options=options)
    experts_down(half, weight(down, experts, hidden, ff), int(down), ff, room.expert, room.routes, count,
                 empty(n, wide, hidden, dtype=dtype)[:, :top_k], bias=biases[2])

def adapters(n, dtype):
    # Of q, k and v, and of experts, whose quantised products take what theirs add.
    hidden, ff, num, top_k, count = 512, 256, 128, 8, empty(1, dtype=i32)
    entries, slots = empty(16, 3 * num, 4, dtype=torch.int64), empty(n, dtype=i32)
    table = lambda parts, num, cols: lora.AdapterTable(entries[:, : parts * num], parts, num, cols, 64, torch.bfloat16)
    rows, of_rows, shrunk = lora.Items(slots, count), table(3, 1, hidden), empty(n * 2 * top_k * 64)
    y = GpuActivations(*both(n, hidden, dtype))
    lora.shrink(y, of_rows, rows, shrunk)
    lora.expand(shrunk, of_rows, rows, empty(n, 1024, dtype=dtype)[:, :768].split((512, 128, 128), 1))
    room, ids = BlockWorkspace(n, top_k, num, "meta"), empty(n, top_k + 1, dtype=i32)[:, :top_k]
    few, gate, up = room.method.up is None, empty(n * top_k, ff, dtype=dtype), empty(n * top_k, ff, dtype=dtype)
    blocks = op.RouteBlocks(room.expert, room.routes)
    items = lora.Items(slots, count, top_k, ids) if few else lora.Items(slots, count, top_k, blocks=blocks)
    lora.shrink(y, table(2, num, hidden), items, shrunk, x_top_k=top_k)
    biases = (empty(num, ff), empty(num, ff))
    lora.expand(shrunk, table(2, num, hidden), items, (gate, up), adds=False, biases=biases)
    options, planes, h = op.Gated("silu", gate, up, True), weight(Q4, num, ff, hidden), both(n * top_k, ff, dtype)
    parts = empty(n, top_k + 1, hidden, dtype=dtype)
    if few:
        small_batch_up(*both(n, hidden), planes, int(Q4), planes, int(Q4), hidden, ids, *h, options=options)
        lora.shrink(GpuActivations(None, *h[1:]), table(1, num, ff), items, shrunk)
        lora.expand_sum(shrunk, table(1, num, ff), items, empty(n, top_k + 1)[:, :top_k], parts[:, 0].contiguous())
        return
    experts_up(y.x, planes, int(Q4), planes, int(Q4), hidden, room.expert, room.routes, top_k, h[0], options=options)
    few_blocks, scratch = BlockWorkspace(30, top_k, num, "meta"), UnpackScratch(empty(1 << 24, dtype=dtype))
    experts_up(y.x[:30], planes, int(Q4), planes, int(Q4), hidden, few_blocks.expert, few_blocks.routes, top_k,
               h[0][:240], options=options)
    wide = BlockWorkspace(n, top_k, num, "meta", is_large_batch=True)
    large_batch_up(y.x, planes, int(Q4), planes, int(Q4), hidden, op.RouteBlocks(wide.expert, wide.routes), top_k, h[0],
                   scratch, options=options)
    lora.shrink(GpuActivations(h[0], None, None), table(1, num, ff), items, shrunk)
    lora.expand(shrunk, table(1, num, ff), items, [parts[0]], out_top_k=top_k + 1)

def quads(n, kind, down):
    hidden, ff, num, top_k, dtype = 512, 256, 128, 8, torch.bfloat16
    s, gate = QuadWorkspace(n, top_k, num, empty(n, hidden, dtype=dtype)), weight(kind, num, ff, hidden)
    count = empty(1, dtype=i32)
    routing, h = op.RouteBlocks(s.expert, s.routes), empty(n * top_k, ff, dtype=dtype)
    quad_order(empty(n, hidden, dtype=dtype), count, s.x)
    quads_up(s.x, gate, int(kind), gate, int(kind), hidden, routing, top_k, h, tile=s.method.up)
    quads_down(h, weight(down, num, hidden, ff), int(down), ff, routing, empty(n, top_k, hidden, dtype=dtype),
               tile=s.method.down)

def large_batch(n, kind, down):
    hidden, ff, num, top_k, dtype = 512, 256, 128, 8, torch.bfloat16
    scratch = UnpackScratch(empty(1 << 24, dtype=dtype))
    room, gate = BlockWorkspace(n, top_k, num, "meta", is_large_batch=True), weight(kind, num, ff, hidden)
    x, routing = empty(n, hidden, dtype=dtype), op.RouteBlocks(room.expert, room.routes)
    h = empty(n * top_k, ff, dtype=dtype)
    large_batch_up(x, gate, int(kind), gate, int(kind), hidden, routing, top_k, h, scratch)
    large_batch_down(h, weight(down, num, hidden, ff), int(down), ff, routing, empty(n, top_k, hidden, dtype=dtype),
                     scratch)
    w = op.weight_of(weight(kind, 1, ff, hidden), int(kind), hidden)
    large_batch_linear(x, w, None, empty(1, dtype=i32), empty(n, ff), scratch)

def rows(n, kind):
    heads, kv_heads, dim, count = 32, 4, 128, empty(1, dtype=i32)
    at = empty(n, dtype=i32)
    embed(at, count, weight(kind, 9, 256), int(kind), empty(n, 256), KvPlaces(empty(3, 64, dtype=i32), at, at, at))
    table = empty(3, 64, dtype=i32)
    embed(at, count, weight(kind, 9, 256), int(kind), empty(n, 256), KvPlaces(table, at, at, at, table, at))
    ids = empty(n, 8, dtype=i32)
    add_norm(empty(n, 256), empty(n, 8, 256), empty(n, 8), ids, empty(n, 256), None, count, empty(256), 1e-6,
             *both(n, 256), empty(n, 256))
    route(empty(n, 128), empty(128, dtype=i32), count, ids, ids, empty(n, 8), empty(128, dtype=i32))
    norm_router(empty(n, 256), empty(n, 256), count, empty(256), 1e-6, empty(128, 256), *both(n, 256), empty(n, 128))
    q, k = empty(n, heads * dim), empty(n, kv_heads * dim)
    pool = empty(50, kv_heads, dim, dtype=torch.float16)
    rope_store(q, k, k, empty(dim), empty(dim), 1e-6, empty(9, dim // 2), empty(9, dim // 2), at, at, count,
               empty(n, heads, dim, dtype=torch.float16), pool, pool)

def sandwiched(n):
    count, wide, at = empty(1, dtype=i32), 2816, empty(n, dtype=i32)
    x, norms = empty(n, wide), SandwichNorms(*[empty(wide)] * 7, empty(1))
    y = GpuActivations(*both(n, wide))
    sandwich_inputs(x, x, norms, count, 1e-6, y, x, GpuActivations(empty(n, wide, dtype=torch.bfloat16), None, None))
    parts = empty(n, 9, wide, dtype=torch.bfloat16)
    weights, ids = empty(n, 9)[:, :8], empty(n, 9, dtype=i32)[:, :8]
    sandwich_sum(x, parts[:, 8:], parts[:, :8], weights, ids, x, None, count, norms, empty(wide), 1e-6, y)
    sandwich_sum(x, empty(n, 1, wide), None, None, None, x, at, count, norms, empty(wide), 1e-6, y)
    route(empty(n, 128), None, count, ids, None, weights, None, expert_scale=empty(128))
    softcap.launch(empty(n, 262144), 30.0, out=empty(n, 262144))
    table, angles = empty(3, 64, dtype=i32), empty(64, 256)
    for heads, kv_heads, dim in ((16, 2, 512), (16, 8, 256)):
        q, k = empty(n, heads * dim), empty(n, kv_heads * dim)
        pool = empty(50, kv_heads, dim, dtype=torch.float16)
        rotated = empty(n, heads, dim, dtype=torch.float16)
        of_dim = (empty(dim), empty(dim), 1e-6, angles[:, : dim // 2].contiguous(), angles[:, : dim // 2].contiguous())
        rope_store(q, k, k, *of_dim, at, at, count, rotated, pool, pool, v_eps=1e-6)
        room = DecodeWorkspace(n, heads, kv_heads, dim, "meta")
        for new, query in ((None, rotated.flatten(1)), (NewTokens(k, k, *of_dim, at, 1e-6), q)):
            decode_attention(query, new, pool, pool, table, at, at, count, room.sums, room.stats, room.counters,
                             *both(n, heads * dim), window=1024 if dim == 256 else 0, scale=1.0)
        prefill_attention(rotated, pool, pool, table, empty(2, 4, dtype=i32),
                          empty(n, heads * dim, dtype=torch.bfloat16), scale=1.0)

def attention(n):
    heads, kv_heads, dim, at = 32, 4, 128, empty(n, dtype=i32)
    q, pool = empty(n, heads, dim, dtype=torch.float16), empty(50, kv_heads, dim, dtype=torch.float16)
    room = DecodeWorkspace(n, heads, kv_heads, dim, "meta")
    table = empty(3, 64, dtype=i32)
    k, angles = empty(n, kv_heads * dim), empty(64, dim // 2)
    projected = NewTokens(k, k, empty(dim), empty(dim), 1e-6, angles, angles, at)
    for new, x in ((None, q.flatten(1)), (projected, empty(n, heads * dim))):
        decode_attention(x, new, pool, pool, table, at, at, empty(1, dtype=i32), room.sums, room.stats, room.counters,
                         *both(n, heads * dim))
    prefill_attention(q, pool, pool, table, empty(2, 4, dtype=i32), empty(n, heads * dim, dtype=torch.bfloat16))

def rows_of_others(n):
    heads, kv_heads, dim, count = 32, 4, 128, empty(1, dtype=i32)
    at, wide = empty(n, dtype=i32), empty(n, 9, dtype=i32)
    ids, weights = wide[:, :8], empty(n, 9)[:, :8]
    for options in (RouterOptions("sigmoid", scale=2.5, groups=8, top_groups=4), RouterOptions("softmax_topk"),
                    RouterOptions("softmax", normalize=False)):
        route(empty(n, 128), empty(128, dtype=i32), count, ids, ids, weights, None, options=options, bias=empty(128))
        route(empty(n, 128), None, count, ids, None, weights, None, options=options)
    select_streamed_routes(ids, empty(128, dtype=i32), ids, ids)
    shared_gate(empty(n, 256), empty(256), count, empty(n, 9)[:, 8], wide[:, 8])
    shared_gate(empty(n, 256), None, count, empty(n, 9)[:, 8])
    norm_router(empty(n, 256), empty(n, 256), count, empty(256), 1e-6, empty(128, 256), *both(n, 256), empty(n, 128),
                bias=empty(128))
    q, k = empty(n, heads * dim), empty(n, kv_heads * dim)
    pool = empty(50, kv_heads, dim, dtype=torch.float16)
    for rotary, q_norm, k_norm in ((64, None, None), (128, empty(heads * dim), empty(kv_heads * dim)),
                                   (32, empty(dim), None)):
        rope_store(q, k, k, q_norm, k_norm, 1e-6, empty(9, rotary // 2), empty(9, rotary // 2), at, at, count,
                   empty(n, heads, dim, dtype=torch.float16), pool, pool)

def attention_of_q8_0(n):
    attention_of_8_bits(n, torch.int8, 4)

def attention_of_fp8(n):
    attention_of_8_bits(n, torch.float8_e4m3fn, 1)

def attention_of_8_bits(n, numbers, scales_of_head):
    heads, kv_heads, dim, at, count = 32, 4, 128, empty(n, dtype=i32), empty(1, dtype=i32)
    q = empty(n, heads, dim, dtype=torch.float16)
    kv = [empty(50, kv_heads, dim, dtype=numbers)] * 2
    scales = dict.fromkeys(("key_scales", "value_scales"), empty(50, kv_heads, scales_of_head, dtype=torch.float16))
    room, table = DecodeWorkspace(n, heads, kv_heads, dim, "meta"), empty(3, 64, dtype=i32)
    k, angles, weight = empty(n, kv_heads * dim), empty(64, dim // 2), empty(dim)
    rope_store(q.flatten(1), k, k, weight, weight, 1e-6, angles, angles, at, at, count, q, *kv, **scales)
    projected = NewTokens(k, k, weight, weight, 1e-6, angles, angles, at)
    for new, x in ((None, q.flatten(1)), (projected, empty(n, heads * dim))):
        decode_attention(x, new, *kv, table, at, at, count, room.sums, room.stats, room.counters,
                         *both(n, heads * dim), **scales)
    out = empty(n, heads * dim, dtype=torch.bfloat16)
    prefill_attention(q, *kv, table, empty(2, 4, dtype=i32), out, **scales)

def attention_of_others(n):
    heads, kv_heads, dim, at = 64, 8, 64, empty(n, dtype=i32)
    q, pool = empty(n, heads, dim, dtype=torch.float16), empty(50, kv_heads, dim, dtype=torch.float16)
    room, table = DecodeWorkspace(n, heads, kv_heads, dim, "meta"), empty(3, 64, dtype=i32)
    k, angles = empty(n, kv_heads * dim), empty(64, 16)
    projected = NewTokens(k, k, None, None, 1e-6, angles, angles, at)
    options = {"window": 128, "sinks": empty(heads), "scale": 0.1}
    for new, x in ((None, q.flatten(1)), (projected, empty(n, heads * dim))):
        decode_attention(x, new, pool, pool, table, at, at, empty(1, dtype=i32), room.sums, room.stats, room.counters,
                         *both(n, heads * dim), **options)
    out, tiles = empty(n, heads * dim, dtype=torch.bfloat16), empty(2, 4, dtype=i32)
    prefill_attention(q, pool, pool, table, tiles, out, **options)
    prefill_attention(q, pool, pool, table, tiles, out, sinks=empty(heads))

def delta_net(n, kind, by_chunks):
    h, at = DeltaHeads(16, 32, 128, 128, 4, True), empty(n, dtype=i32)
    projected, states = empty(n, h.channels + h.value_width + 64, dtype=kind), empty(3, h.state_values)
    qkv, z, gates = projected.split([h.channels, h.value_width, 64], dim=1)
    x = delta.DeltaTensors(qkv, empty(n, h.channels, dtype=kind), delta.Gates(gates, gates[:, 32:], 2), empty(32),
                           empty(32), states, empty(n, h.value_width, dtype=kind))
    sequences, count = delta.StepSequences(at, at, at, at), empty(1, dtype=i32)
    delta.convolve(x, empty(4, h.channels), h, sequences, count)
    if by_chunks:
        delta.chunked_rule(x, h, sequences, empty(3, 2, dtype=i32), empty(n, 32, 64, dtype=kind))
    else:
        delta.recurrent_rule(x, h, sequences)
    y, codes, scales = both(n, h.value_width, kind)
    delta.gated_norm(x.out, z, empty(128), 1e-6, count, y, codes, scales)
    delta.sigmoid_gate(y, z, 256, count, codes, scales)

def wide_attention(n):
    heads, kv_heads, dim, at = 16, 2, 256, empty(n, dtype=i32)
    q, pool = empty(n, heads, dim, dtype=torch.float16), empty(50, kv_heads, dim, dtype=torch.float16)
    room, table = DecodeWorkspace(n, heads, kv_heads, dim, "meta"), empty(3, 64, dtype=i32)
    k, angles = empty(n, kv_heads * dim), empty(64, 32)
    projected = NewTokens(k, k, empty(dim), empty(dim), 1e-6, angles, angles, at)
    for new, x in ((None, q.flatten(1)), (projected, empty(n, heads * dim))):
        decode_attention(x, new, pool, pool, table, at, at, empty(1, dtype=i32), room.sums, room.stats, room.counters,
                         *both(n, heads * dim))
    out, tiles = empty(n, heads * dim, dtype=torch.bfloat16), empty(2, 4, dtype=i32)
    prefill_attention(q, pool, pool, table, tiles, out)

def latent_attention(n, kind):
    heads, nope, rank, rotary, f16 = 20, 192, 512, 64, torch.float16
    at, count, table = empty(n, dtype=i32), empty(1, dtype=i32), empty(3, 64, dtype=i32)
    keys, angles = empty(50, 1, rank + rotary, dtype=f16), empty(9, rotary // 2)
    projected = empty(n, heads * (nope + rotary) + rank + rotary, dtype=kind)
    q, latent_part = projected.split([heads * (nope + rotary), rank + rotary], dim=1)
    nopes, rotated = empty(n, heads, nope, dtype=torch.bfloat16), empty(n, heads, rotary, dtype=f16)
    latent.norm_rows(q, empty(q.shape[1]), 1e-6, count, *both(n, q.shape[1], kind))
    y, codes, scales = both(n, heads * 256, kind)
    latent.norm_rows(y, None, 1e-6, count, None, codes, scales, parts=heads)
    latent.latent_store(q, latent_part, empty(rank), 1e-6, angles, angles, at, at, count, 0.1, nopes, rotated, keys)
    queries, attended = empty(n, heads, rank, dtype=f16), empty(n, heads, rank, dtype=torch.bfloat16)
    for planes, x, out in ((empty_planes(Q8_0, (heads, rank, nope), "meta"), nopes, queries),
                           (empty_planes(Q4, (heads, 256, rank), "meta"), attended, y)):
        latent.linear_by_head(x.flatten(0, 1), [planes.codes, planes.scales, planes.supers], int(planes.type),
                              x.shape[2], latent.by_head(n, heads, "meta"), count, out)
    room, tiles = latent.decode_workspace(n, heads, rank, "meta"), empty(2, 4, dtype=i32)
    latent.decode_latent(queries, rotated, keys, table, at, at, count, room, attended)
    latent.prefill_latent(queries, rotated, keys, table, tiles, attended)

def sampling(n):
    vocab, at, count = 5000, empty(n, dtype=i32), empty(1, dtype=i32)
    s, r = DeviceSamplerState(n, vocab, "meta"), SamplingWorkspace(n, vocab, "meta")
    state = (s.params, s.bias_ids, s.bias_values, s.stop_ids, s.history)
    room = (r.block_max, r.block_sum, r.values, r.ids)
    sample(empty(n, vocab), at, count, *state, empty(n, 157, dtype=i32), r.edited, *room, at)
    logprobs(empty(n, vocab), at, count, *room, empty(n), at, empty(n, 20, dtype=i32), empty(n, 20))

def pointwise_kernels():
    from moeserve.kernels import pointwise as pw
    every = pw.pointwise(lambda x, y, s: pw.where(pw.minimum(x, s) > y, pw.tanh(x) * pw.erf(y), pw.rsqrt(abs(y)) + s))
    chain = pw.pointwise(lambda x, y: (x & y).to(torch.float32) / 3)
    for dtype in (torch.float16, torch.bfloat16, f32, torch.float64, i32):
        every.launch(empty(7, 40, dtype=dtype), empty(40, dtype=dtype), 0.5)
        every.launch(empty(7, 3, 40, dtype=dtype).transpose(0, 2), empty(1, 3, 1), 2)
    chain.launch(empty(5000, dtype=torch.bool), empty(5000, dtype=torch.uint8))
    chain.launch(empty(1, dtype=torch.int16)[0], empty(1, dtype=torch.int64)[0])
    every.launch(empty(1 << 17, 1 << 15), empty(1 << 17, 1), True)

def piecewise(dtype, dim):
    from moeserve.kernels.piecewise import op as attention
    q, k = empty(2, 8, 300, dim, dtype=dtype), empty(2, 2, 700, dim, dtype=dtype)
    attention.forward(empty(1, 8, 3000, dim, dtype=dtype), k[:1], empty(1, 8, 3000, dim, dtype=dtype), k[:1], k[:1],
                      100, True)
    for causal in (False, True):
        out, lse = attention.forward(q, k, q, k, k, 100, causal)
        attention.backward((q, k, q, k, k), out, lse, q, 100, causal)

def over_gpus(dtype):
    inbox, peers = empty(2, 4, MAX_NUMBERS, dtype=torch.int64), empty(4, dtype=torch.int64)
    for polls in (0, 1000):
        push_sum_kernel((4,), empty(2048, dtype=dtype), inbox, peers, empty(256, dtype=i32), 2048, 1, 4, MAX_NUMBERS,
                        polls, BLOCK, launch.PDL, num_warps=4, launch_pdl=launch.PDL)
    sum_parts(empty(40, 8, 2048, dtype=dtype), empty(40, 8), empty(40, 8, dtype=i32), empty(1, dtype=i32),
              empty(40, 1, 2048, dtype=dtype))
    size = MessageSize(4, 200, 2048, 128)
    sums = SumNorm(1, size, empty(size.region_bytes, dtype=torch.uint8), [0] * 4)
    for is_trial in (False, True):
        sums.trial(is_trial)
        for rows in (2, 200):
            own, x = empty(rows, 1, 2048, dtype=f32 if rows < 64 else torch.bfloat16), empty(rows, 2048)
            one = empty(1, dtype=i32)
            sums.add_norm(own, x, one, empty(2048), 1e-6, GpuActivations(*both(rows, 2048)),
                          empty(rows, 2048), attended=x)
        sums.norm_router(empty(2, 1, 2048), x[:2], one, empty(2048), 1e-6, empty(128, 2048),
                         GpuActivations(*both(2, 2048)), empty(2, 128))

def panels(*kinds):
    for kind in kinds:
        layout = PanelLayout.of(kind, kind.layout)
        nbytes = 2 * 64 // 32 * (768 // layout.cols) * layout.block_bytes
        unpack_panels(empty(nbytes, dtype=torch.uint8), empty_planes(kind, (2, 64, 768), "meta"), 2)
        unpack_scattered(empty(3, 4, dtype=torch.int64), kind, 64, 768)

def promotions():
    copy_scattered(empty(19, 3, dtype=torch.int64))
    store_scattered(empty(48, 128, dtype=i32), empty(7, 2, dtype=torch.int64))

def hand_off(n):
    x, ids = empty(n, 2048), empty(n, 8, dtype=i32)
    word, long, flags = empty(4, dtype=i32), empty(2, dtype=torch.int64), empty(n, dtype=i32)
    codes, metas = empty(n, 3072, dtype=torch.int8), empty(n, 768, dtype=i32)
    for on_gpu, defer in ((None, 0), (ids, 0), (ids, 2)):
        publish_kernel((n,), x, ids, empty(n, 8), empty(128, dtype=i32), on_gpu, codes, metas, None, ids, ids,
                       empty(n, 8), long, word, word, long, flags, word, word if defer else None, word, 2048, 8, 8,
                       defer, 2048, 8, launch.PDL, num_warps=8, enable_fp_fusion=False)
    poll_kernel((1,), word, word, launch.PDL, num_warps=1)
    combine_kernel((n,), x, flags, flags, x, 2048, 2048, launch.PDL, num_warps=8)

def pages(size):
    rows = PageRows([empty(40, size, dtype=torch.uint8)] * 2, 4)
    for move in (rows.gather, rows.scatter):
        move(empty(8, dtype=torch.int64), empty(2, 8 * size, dtype=torch.uint8))

eval(sys.argv[1])
"""
