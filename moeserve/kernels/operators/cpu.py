"""The operators on CPU tensors: calls of the C++ pool that wait for the result. Weights are GGUF rows, used in
place."""

from __future__ import annotations

import functools
import os

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.cpu_stream import AttentionPlan, CpuStream, LinearGroup, Matrix
from moeserve.kernels.operators.piecewise import check as piecewise_check
from moeserve.kernels.operators.piecewise import reference as piecewise
from moeserve.kernels.operators.pointwise import library
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.sampling.cpu import SamplerState
from moeserve.kernels.stream_operands import Activations, Heads, KvLayer, RoutingWorkspace


@functools.cache
def _stream() -> CpuStream:
    return CpuStream(len(os.sched_getaffinity(0)))


def _matrix(weight: list[Tensor], kind: int, cols: int) -> Matrix:
    rows = weight[0]
    return _stream().view(rows.view(torch.uint8).numpy(), kind, (*rows.shape[:2], cols))


def _activations(x: Tensor) -> Activations:
    workspace = Activations(*x.shape)
    workspace.f32.copy_(x)
    workspace.q8.copy_(quantize(x).rows())
    return workspace


def embed(ids: Tensor, table: list[Tensor], kind: int, cols: int) -> Tensor:
    x = torch.empty(len(ids), cols)
    _stream().embed(table[0].numpy(), kind, ids, len(ids), x)
    _stream().wait()
    return x


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = Activations(*x.shape, q8=False)
    _stream().norm(x, weight, eps, len(x), y)
    _stream().wait()
    return y.f32


def linear(x: Tensor, weight: list[Tensor], kind: int) -> Tensor:
    matrix = _matrix(weight, kind, x.shape[1])
    out = torch.empty(len(x), matrix.rows)
    _stream().linear(_activations(x), len(x), LinearGroup([matrix]), [out])
    _stream().wait()
    return out


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor,
    slots: Tensor, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    q = q.clone()
    heads = Heads(q.shape[1], k.shape[1], q.shape[2])
    kv = KvLayer(keys, values)
    _stream().rope_store(q, k.clone(), v, q_norm, k_norm, eps, cos, sin, slots, kv, len(q), heads)
    _stream().wait()
    return q


def attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, counts: Tensor, positions: Tensor,
    req_slots: Tensor,
) -> Tensor:  # fmt: skip
    heads, plan = Heads(q.shape[1], keys.shape[1], q.shape[2]), AttentionPlan()
    columns = (rows.numpy(), counts.numpy(), positions.numpy(), req_slots.numpy())
    build_attention_plan(plan, *columns, table.numpy(), heads, _stream().threads)
    out = Activations(len(q), heads.num * heads.dim, q8=False)
    _stream().attention(plan, q, KvLayer(keys, values), out, heads)
    _stream().wait()
    return out.f32


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    workspace = RoutingWorkspace(len(logits), logits.shape[1], top_k)
    _stream().route(logits, len(logits), workspace)
    _stream().wait()
    return workspace.ids, workspace.weights


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate: list[Tensor], gate_kind: int, up: list[Tensor], up_kind: int,
    down: list[Tensor], down_kind: int,
) -> Tensor:  # fmt: skip
    (n, hidden), top_k, (num, ff) = x.shape, ids.shape[1], gate[0].shape[:2]
    g, u = _matrix(gate, gate_kind, hidden), _matrix(up, up_kind, hidden)
    workspace = RoutingWorkspace(n, num, top_k)
    workspace.ids.copy_(ids)
    workspace.weights.copy_(weights)
    out = torch.zeros(n, hidden)
    counts = torch.zeros(2, num, dtype=torch.int64)
    d, y, h = _matrix(down, down_kind, ff), _activations(x), Activations(n * top_k, ff)
    _stream().experts(g, u, d, y, n, workspace, h, counts, out)
    _stream().wait()
    return out


def piecewise_attention(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, distance: int, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    piecewise_check.check(q1, k1, q2, k2, v, distance)
    out, lse = piecewise.piecewise_attention(q1, k1, q2, k2, v, distance, causal, scale)
    return out.to(q1.dtype).contiguous(), lse.float()


def piecewise_attention_backward(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, out: Tensor, lse: Tensor, gradient: Tensor,
    distance: int, causal: bool, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    piecewise_check.check(q1, k1, q2, k2, v, distance)
    found = piecewise.gradients((q1, k1, q2, k2, v), gradient, distance, causal, scale)
    return tuple(x.contiguous() for x in found)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return library.silu_mul(gate, up)


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    return library.swiglu_oai(gate, up)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    return library.sigmoid_mul(x, gate)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    state = SamplerState(len(logits), logits.shape[1])
    for i in range(len(logits)):
        state.bind(
            i, temperature=float(temperature[i]), top_k=int(top_k[i]), top_p=float(top_p[i]), min_p=float(min_p[i]),
            seed=int(seeds[i]) % 2**64, output=np.zeros(int(positions[i]), np.int32),
        )  # fmt: skip
    tokens, _ = state.sample(logits, np.arange(len(logits), dtype=np.int32))
    return torch.from_numpy(tokens)
