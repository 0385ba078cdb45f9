"""What mixes tokens: attention of all kinds, and the delta net."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moeserve.kernels.attention.new_tokens import NewTokens
from moeserve.kernels.attention.op import decode_attention, prefill_attention
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.delta_net import op as delta
from moeserve.kernels.delta_net.heads import DeltaHeads
from moeserve.kernels.embed.op import add_deep
from moeserve.kernels.latent import op as latent
from moeserve.kernels.mamba2 import op as mamba2
from moeserve.kernels.mamba2.heads import Mamba2Heads
from moeserve.kernels.operators.piecewise import op as piecewise_op
from moeserve.kernels.planes import empty_planes
from moeserve.kernels.rope.op import SectionPositions, rope_store
from moeserve.kernels.short_conv import op as short_conv
from moeserve.kernels.short_conv.heads import ShortConvHeads
from moeserve.quantization.table import Q8_0
from tests.support.measuring.gpu_operators.tensors import Q4, both, empty, i32


def decode(
    n: int,
    heads: int,
    pool: torch.Tensor,
    new: NewTokens,
    *,
    values: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Attention of queries that are rotated already, and of new tokens' own queries. pool [slots, kv_heads, dim];
    values: the pool of values, None: the same."""
    (_, kv_heads, dim), values = pool.shape, pool if values is None else values
    room, table, at = (
        DecodeWorkspace(n, heads, kv_heads, values.shape[2], "meta"),
        empty(3, 64, dtype=i32),
        empty(n, dtype=i32),
    )
    rotated = empty(n, heads * dim, dtype=torch.float16)
    for tokens, queries in ((None, rotated), (new, empty(n, heads * dim))):
        decode_attention(
            queries,
            tokens,
            pool,
            values,
            table,
            at,
            at,
            empty(1, dtype=i32),
            room,
            *both(n, heads * values.shape[2]),
            **options,
        )


def prefill(
    n: int, heads: int, pool: torch.Tensor, *, values: torch.Tensor | None = None, **options: Any
) -> None:
    dim, values = pool.shape[2], pool if values is None else values
    q, out = (
        empty(n, heads, dim, dtype=torch.float16),
        empty(n, heads * values.shape[2], dtype=torch.bfloat16),
    )
    prefill_attention(q, pool, values, empty(3, 64, dtype=i32), empty(2, 4, dtype=i32), out, **options)


def attention(n: int) -> None:
    attention_of(n, 32, 4, 128, 128)


def wide_attention(n: int) -> None:
    attention_of(n, 16, 2, 256, 64)


def attention_of(n: int, heads: int, kv_heads: int, dim: int, rotary: int) -> None:
    pool = empty(50, kv_heads, dim, dtype=torch.float16)
    k, angles = empty(n, kv_heads * dim), empty(64, rotary // 2)
    new = NewTokens(k, k, empty(dim), empty(dim), 1e-6, angles, angles, empty(n, dtype=i32))
    decode(n, heads, pool, new)
    prefill(n, heads, pool)


def attention_with_pictures(n: int) -> None:
    """Rows that rotate by three positions, and rows that see others behind them."""
    heads, kv_heads, dim, at = 16, 2, 256, empty(n, dtype=i32)
    pool = empty(50, kv_heads, dim, dtype=torch.float16)
    k, angles, weight = empty(n, kv_heads * dim), empty(64, 32), empty(dim)
    sections = SectionPositions(empty(n, 3, dtype=i32), 11, 10)
    new = NewTokens(k, k, weight, weight, 1e-6, angles, angles, at, sections=sections)
    decode(n, heads, pool, new)
    q = empty(n, heads, dim, dtype=torch.float16)
    norms, count = (weight, weight, 1e-6), empty(1, dtype=i32)
    rope_store(
        empty(n, heads * dim), k, k, *norms, angles, angles, at, at, count, q, pool, pool, sections=sections
    )
    table, room = empty(3, 64, dtype=i32), DecodeWorkspace(n, heads, kv_heads, dim, "meta")
    decode_attention(
        q.flatten(1), None, pool, pool, table, at, at, count, room,
        *both(n, heads * dim), window=32, ends=at,
    )  # fmt: skip
    prefill(n, heads, pool, window=32, ends=at)
    add_deep(at, count, empty(n, 3 * 2048)[:, 2048:4096], empty(n, 2048))


def attention_of_q8_0(n: int) -> None:
    attention_of_8_bits(n, torch.int8, 4)


def attention_of_fp8(n: int) -> None:
    attention_of_8_bits(n, torch.float8_e4m3fn, 1)


def attention_of_8_bits(n: int, numbers: torch.dtype, scales_of_head: int) -> None:
    heads, kv_heads, dim, at, count = 32, 4, 128, empty(n, dtype=i32), empty(1, dtype=i32)
    q = empty(n, heads, dim, dtype=torch.float16)
    pool = empty(50, kv_heads, dim, dtype=numbers)
    scales = empty(50, kv_heads, scales_of_head, dtype=torch.float16)
    k, angles, weight = empty(n, kv_heads * dim), empty(64, dim // 2), empty(dim)
    rope_store(
        q.flatten(1),
        k,
        k,
        weight,
        weight,
        1e-6,
        angles,
        angles,
        at,
        at,
        count,
        q,
        pool,
        pool,
        key_scales=scales,
        value_scales=scales,
    )
    new = NewTokens(k, k, weight, weight, 1e-6, angles, angles, at)
    decode(n, heads, pool, new, key_scales=scales, value_scales=scales)
    prefill(n, heads, pool, key_scales=scales, value_scales=scales)


def attention_of_others(n: int) -> None:
    heads, kv_heads, dim = 64, 8, 64
    pool, sinks = empty(50, kv_heads, dim, dtype=torch.float16), empty(heads)
    k, angles = empty(n, kv_heads * dim), empty(64, 16)
    new = NewTokens(k, k, None, None, 1e-6, angles, angles, empty(n, dtype=i32))
    decode(n, heads, pool, new, window=128, sinks=sinks, scale=0.1)
    prefill(n, heads, pool, window=128, sinks=sinks, scale=0.1)
    prefill(n, heads, pool, sinks=sinks)


def attention_of_two_widths(n: int) -> None:
    """Keys of 192 and values of 128, as MiMo-V2's; norms behind the rotation, as Hunyuan's."""
    heads, kv_heads, dim, v_dim, at = 64, 4, 192, 128, empty(n, dtype=i32)
    keys, values = (empty(50, kv_heads, width, dtype=torch.float16) for width in (dim, v_dim))
    k, v, angles = empty(n, kv_heads * dim), empty(n, kv_heads * v_dim), empty(64, 32)
    q, weight = empty(n, heads, dim, dtype=torch.float16), empty(dim)
    rope_store(
        q.flatten(1), k, v, weight, weight, 1e-6, angles, angles, at, at, empty(1, dtype=i32), q, keys, values,
        norm_after=True, v_scale=0.7,
    )  # fmt: skip
    new = NewTokens(k, v, weight, weight, 1e-6, angles, angles, at, norm_after=True, v_scale=0.7)
    decode(n, heads, keys, new, values=values, window=128)
    prefill(n, heads, keys, values=values)


def latent_attention(n: int, kind: torch.dtype) -> None:
    heads, nope, rank, rotary, f16 = 20, 192, 512, 64, torch.float16
    at, count, table = empty(n, dtype=i32), empty(1, dtype=i32), empty(3, 64, dtype=i32)
    keys, angles = empty(50, 1, rank + rotary, dtype=f16), empty(9, rotary // 2)
    projected = empty(n, heads * (nope + rotary) + rank + rotary, dtype=kind)
    q, latent_part = projected.split([heads * (nope + rotary), rank + rotary], dim=1)
    nopes, rotated = empty(n, heads, nope, dtype=torch.bfloat16), empty(n, heads, rotary, dtype=f16)
    latent.norm_rows(q, empty(q.shape[1]), 1e-6, count, *both(n, q.shape[1], kind))
    y, codes, scales = both(n, heads * 256, kind)
    latent.norm_rows(y, None, 1e-6, count, None, codes, scales, parts=heads)
    latent.latent_store(
        q, latent_part, empty(rank), 1e-6, angles, angles, at, at, count, 0.1, nopes, rotated, keys
    )
    queries, attended = empty(n, heads, rank, dtype=f16), empty(n, heads, rank, dtype=torch.bfloat16)
    for planes, x, out in (
        (empty_planes(Q8_0, (heads, rank, nope), "meta"), nopes, queries),
        (empty_planes(Q4, (heads, 256, rank), "meta"), attended, y),
    ):
        latent.linear_by_head(
            x.flatten(0, 1),
            [planes.codes, planes.scales, planes.supers],
            int(planes.type),
            x.shape[2],
            latent.by_head(n, heads, "meta"),
            count,
            out,
        )
    room, tiles = latent.decode_workspace(n, heads, rank, rotary, "meta"), empty(2, 4, dtype=i32)
    latent.decode_latent(queries, rotated, keys, table, at, at, count, room, attended)
    latent.prefill_latent(queries, rotated, keys, table, tiles, attended)


def delta_net(n: int, kind: torch.dtype, by_chunks: bool) -> None:
    h, at = DeltaHeads(16, 32, 128, 128, 4, True), empty(n, dtype=i32)
    projected, states = empty(n, h.channels + h.value_width + 64, dtype=kind), empty(3, h.state_values)
    qkv, z, gates = projected.split([h.channels, h.value_width, 64], dim=1)
    x = delta.DeltaTensors(
        qkv,
        empty(n, h.channels, dtype=kind),
        delta.Gates(gates, gates[:, 32:], 2),
        empty(32),
        empty(32),
        states,
        empty(n, h.value_width, dtype=kind),
    )
    sequences, count = delta.StepSequences(at, at, at, at), empty(1, dtype=i32)
    delta.convolve(x, empty(4, h.channels), h, sequences, count)
    if by_chunks:
        delta.chunked_rule(x, h, sequences, empty(3, 2, dtype=i32), empty(n, 32, 64, dtype=kind))
    else:
        delta.recurrent_rule(x, h, sequences)
    y, codes, scales = both(n, h.value_width, kind)
    delta.gated_norm(x.out, z, empty(128), 1e-6, count, y, codes, scales)
    delta.sigmoid_gate(y, z, 256, count, codes, scales)
    delta.sigmoid_gate(y, z[:, : h.value_width // 128], 128, count, codes, scales, softplus=by_chunks)


def kimi_delta(n: int, kind: torch.dtype) -> None:
    h, at = DeltaHeads(32, 32, 128, 128, 4, is_kimi=True), empty(n, dtype=i32)
    qkv, z, a = (empty(n, width, dtype=kind) for width in (h.channels, h.value_width, h.decays))
    gates = delta.Gates(empty(n, 32, dtype=kind), a, 1)
    mixed, out, states = (
        empty(n, h.channels, dtype=kind),
        empty(n, h.value_width, dtype=kind),
        empty(3, h.state_values),
    )
    x = delta.DeltaTensors(qkv, mixed, gates, empty(32), empty(h.decays), states, out)
    sequences = delta.StepSequences(at, at, at, at)
    delta.recurrent_rule(x, h, sequences)
    for heads in (h, replace(h, decay_bound=-5.0)) if n > 32 else ():
        of_pairs = (empty(n, 32, 64, dtype=kind) for _ in range(2))
        delta.kimi_chunked_rule(x, heads, sequences, empty(3, 2, dtype=i32), *of_pairs)
    y, codes, scales = both(n, h.value_width, kind)
    delta.gated_norm(out, z, empty(128), 1e-6, empty(1, dtype=i32), y, codes, scales, sigmoid=True)


NEMOTRON = Mamba2Heads(64, 8, 64, 128, 4)
FALCON = Mamba2Heads(24, 1, 128, 256, 4)  # of 7B


def mamba_2(n: int, kind: torch.dtype, by_chunks: bool, h: Mamba2Heads = NEMOTRON) -> None:
    at = empty(n, dtype=i32)
    rows = empty(n, h.row_width, dtype=kind)
    mixed, out = (empty(n, width, dtype=kind) for width in (h.channels, h.value_width))
    a, states = empty(h.num_heads), empty(3, h.state_values)
    x = mamba2.Mamba2Tensors(rows[:, h.value_width :], mixed, a, a, a, states, out)
    sequences, count = delta.StepSequences(at, at, at, at), empty(1, dtype=i32)
    mamba2.convolve(x, empty(4, h.channels), empty(h.channels), h, sequences, count)
    mamba2.scan(x, h, sequences, by_chunks=by_chunks)
    y, codes, scales = both(n, h.value_width, kind)
    for groups in {h.num_groups, 1}:
        norm = empty(h.value_width)
        mamba2.gated_norm(out, rows[:, : h.value_width], norm, 1e-5, groups, count, y, codes, scales)
    mamba2.gated_norm(out, rows[:, : h.value_width], None, 1e-5, h.num_groups, count, y, codes, scales)


def short_convolution(n: int, kind: torch.dtype) -> None:
    h, at = ShortConvHeads(2048, 3), empty(n, dtype=i32)
    y, codes, scales = both(n, h.channels, kind)
    short_conv.short_conv(
        empty(n, h.row_width, dtype=kind), empty(3, h.channels), h, empty(3, h.state_values),
        delta.StepSequences(at, at, at, at), empty(1, dtype=i32), y, codes, scales,
    )  # fmt: skip


def recurrent_drafts(kind: torch.dtype) -> None:
    """Launches what only steps with drafts launch: records of drafts in rows, and states moved on by them."""
    n, at = 8, empty(8, dtype=i32)
    sequences = delta.StepSequences(at, at, at, at, delta.SequenceDrafts(at, at))
    committed = empty(1, dtype=i32), empty(3, 8, dtype=i32), n
    h = NEMOTRON
    rows, states = empty(n, h.channels + h.num_heads, dtype=kind), empty(3, h.state_values)
    mixed, out = (empty(n, width, dtype=kind) for width in (h.channels, h.value_width))
    a = empty(h.num_heads)
    x = mamba2.Mamba2Tensors(rows, mixed, a, a, a, states, out)
    records = empty(1, n, h.pending_values)
    mamba2.scan(x, h, sequences, by_chunks=False, records=records[0])
    mamba2.commit_drafts(records, states, *committed, h)
    conv = ShortConvHeads(2048, 3)
    of_conv, records = empty(3, conv.state_values), empty(1, n, conv.pending_values)
    short_conv.short_conv(
        *(empty(n, conv.row_width, dtype=kind), empty(3, conv.channels), conv, of_conv, sequences),
        *(at[:1], *both(n, conv.channels, kind), records[0]),
    )
    short_conv.commit_drafts(records, of_conv, *committed, conv)


def piecewise(dtype: torch.dtype, dim: int) -> None:
    q, k = empty(2, 8, 300, dim, dtype=dtype), empty(2, 2, 700, dim, dtype=dtype)
    piecewise_op.forward(
        empty(1, 8, 3000, dim, dtype=dtype),
        k[:1],
        empty(1, 8, 3000, dim, dtype=dtype),
        k[:1],
        k[:1],
        100,
        True,
    )
    for causal in (False, True):
        out, lse = piecewise_op.forward(q, k, q, k, k, 100, causal)
        piecewise_op.backward((q, k, q, k, k), out, lse, q, 100, causal)
