"""The operators on CUDA tensors: launches of each operator's folder, with buffers allocated per call."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.op import prefill_attention, prefill_tiles
from moeserve.kernels.embed.op import embed as launch_embed
from moeserve.kernels.experts.op import BlockWorkspace, align_routes, experts_down, experts_up
from moeserve.kernels.experts.small_batch import small_batch_down, small_batch_up
from moeserve.kernels.linear.op import int8_tokens
from moeserve.kernels.linear.op import linear as launch_linear
from moeserve.kernels.norm.op import add_norm
from moeserve.kernels.operators.piecewise import op as piecewise
from moeserve.kernels.operators.pointwise import library
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.rope.op import rope_store as launch_rope_store
from moeserve.kernels.routing.op import route as launch_route
from moeserve.kernels.sampling.op import DeviceSamplerState, SamplingWorkspace
from moeserve.kernels.sampling.op import sample as launch_sample
from moeserve.quantization import QUANT_TYPES
from moeserve.quantization.table import F16


def _count(x: Tensor) -> Tensor:
    # A copy from the host, which waits: GEMV reads the count before the previous kernel has ended.
    return torch.tensor([len(x)], dtype=torch.int32, device=x.device)


def _activations(x: Tensor, *, small_batch: bool, kinds: tuple[int, ...]) -> GpuActivations:
    """Returns the products' input: for few rows as float32 and int8, for many in the dtype that the tensor cores
    multiply."""
    if small_batch:
        q = quantize(x)
        return GpuActivations(x, q.codes, q.scales)
    # bfloat16 cannot overflow; but it would lose three bits of float16 weights, and Triton's interpreter lacks it.
    half = F16.number in kinds or not x.is_cuda
    return GpuActivations(x.to(torch.float16 if half else torch.bfloat16), None, None)


def embed(ids: Tensor, table: list[Tensor], kind: int, cols: int) -> Tensor:
    x = torch.empty(len(ids), cols, device=ids.device)
    launch_embed(ids, _count(ids), table, kind, x)
    return x


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x)
    add_norm(x, None, None, None, None, None, _count(x), weight, eps, y, None, None)
    return y


def linear(x: Tensor, weight: list[Tensor], kind: int) -> Tensor:
    a = _activations(x, small_batch=len(x) <= int8_tokens(weight[0].shape[1]), kinds=(kind,))
    out = torch.empty(len(x), weight[0].shape[1], device=x.device)
    launch_linear(a.x, a.codes, a.scales, _count(x), weight, kind, None, 0, x.shape[1], out)
    return out


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor,
    slots: Tensor, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(q)
    rows = torch.arange(len(q), dtype=torch.int32, device=q.device)  # row i of cos and sin belongs to row i
    launch_rope_store(
        q.flatten(1), k.flatten(1), v.flatten(1), q_norm, k_norm, eps, cos, sin, rows, slots, _count(q), out,
        keys, values,
    )  # fmt: skip
    return out


def attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, counts: Tensor, positions: Tensor,
    req_slots: Tensor,
) -> Tensor:  # fmt: skip
    out = torch.empty(len(q), q.shape[1] * q.shape[2], device=q.device)
    columns = (rows.numpy(), counts.numpy(), positions.numpy(), req_slots.numpy())
    tiles = torch.from_numpy(prefill_tiles(*columns, q.shape[1], *keys.shape[1:]))
    prefill_attention(q.to(keys.dtype), keys, values, table, tiles.to(q.device), out)
    return out


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.empty(len(logits), top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(len(logits), top_k, device=logits.device)
    launch_route(logits, None, _count(logits), ids, None, weights, None)
    return ids, weights


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate: list[Tensor], gate_kind: int, up: list[Tensor], up_kind: int,
    down: list[Tensor], down_kind: int,
) -> Tensor:  # fmt: skip
    (n, hidden), top_k, (num, ff), device = x.shape, ids.shape[1], gate[0].shape[:2], x.device
    workspace = BlockWorkspace(n, top_k, num, device)
    small_batch = workspace.method.up is None
    a = _activations(x, small_batch=small_batch, kinds=(gate_kind, up_kind, down_kind))
    assert a.x is not None
    as_int8 = small_batch and QUANT_TYPES[down_kind].is_quantised
    h = GpuActivations.empty(n * top_k, ff, device, dtype=None if as_int8 else a.x.dtype, quantised=as_int8)
    if small_batch:
        out = torch.empty(n, hidden, device=device)
        small_batch_up(
            a.x, a.codes, a.scales, gate, gate_kind, up, up_kind, hidden, ids, h.x, h.codes, h.scales
        )  # fmt: skip
        small_batch_down(h.x, h.codes, h.scales, down, down_kind, ff, ids, weights, _count(x), out)
        return out
    assert h.x is not None
    align_routes(ids, _count(x), num, workspace.expert, workspace.routes)
    experts_up(a.x, gate, gate_kind, up, up_kind, hidden, workspace.expert, workspace.routes, top_k, h.x)
    parts = torch.empty(n, top_k, hidden, device=device)
    experts_down(h.x, down, down_kind, ff, workspace.expert, workspace.routes, _count(x), parts)
    return torch.einsum("nkh,nk->nh", parts, weights)


def piecewise_attention(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, distance: int, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return piecewise.forward(q1, k1, q2, k2, v, distance, causal, scale)


def piecewise_attention_backward(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, out: Tensor, lse: Tensor, gradient: Tensor,
    distance: int, causal: bool, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return piecewise.backward((q1, k1, q2, k2, v), out, lse, gradient, distance, causal, scale)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return library.silu_mul.launch(gate, up)


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    return library.swiglu_oai.launch(gate, up)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    return library.sigmoid_mul.launch(x, gate)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    (n, vocab), device = logits.shape, logits.device
    state, workspace = (
        DeviceSamplerState(n, vocab, device, history_rows=0),
        SamplingWorkspace(n, vocab, device),
    )
    for i in range(n):
        state.bind(
            i, temperature=float(temperature[i]), top_k=int(top_k[i]), top_p=float(top_p[i]), min_p=float(min_p[i]),
            seed=int(seeds[i]) % 2**64, output=np.zeros(int(positions[i]), np.int32),
        )  # fmt: skip
    tokens = torch.empty(n, dtype=torch.int32, device=device)
    launch_sample(
        logits, torch.arange(n, dtype=torch.int32, device=device), _count(logits), state.params, state.bias_ids,
        state.bias_values, state.stop_ids, state.history, None, None, workspace.block_max, workspace.block_sum,
        workspace.values, workspace.ids, tokens,
    )  # fmt: skip
    return tokens
