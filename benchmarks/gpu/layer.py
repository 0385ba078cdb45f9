"""One layer of the model out of the kernels, as a server would call them: preallocated, for batches of one size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.shape import SHAPE, Shape, random_planes, tensors
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.new_tokens import NewTokens
from moeserve.kernels.attention.op import decode_attention, prefill_attention
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.experts.op import BlockWorkspace, align_routes, experts_down, experts_up
from moeserve.kernels.experts.quads import QuadWorkspace, quad_order, quads_down, quads_up
from moeserve.kernels.experts.small_batch import small_batch_down, small_batch_up
from moeserve.kernels.linear.op import INT8_TOKENS, linear
from moeserve.kernels.linear.operands import RouteBlocks
from moeserve.kernels.norm.op import add_norm
from moeserve.kernels.planes import Planes
from moeserve.kernels.rope.op import rope_store
from moeserve.kernels.routing.op import norm_router, route
from moeserve.models.step_buffers import QUAD_ROWS
from moeserve.quantization.table import F32, Q4_K, Q6_K

Q4, Q6 = Q4_K, Q6_K
FLOAT_ROWS = 64  # as models/step_buffers.py
Sums = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # add_norm's parts .. extra


@dataclass
class LayerWeights:
    attn_norm: Tensor
    qkv: Planes  # rows of q, k and v, one after another
    v_merged: Planes | None  # v by itself, where its type is another
    q_norm: Tensor
    k_norm: Tensor
    attn_output: Planes
    ffn_norm: Tensor
    router: Planes
    gate: Planes
    up: Planes
    down: Planes


def random_layer(index: int, s: Shape = SHAPE, device: str = "cuda") -> LayerWeights:
    """Q4_K_M: in half of the layers v and down are Q6_K."""
    q, kv = s.heads * s.dim, s.kv_heads * s.dim
    more = index % 2 == 0
    ones = torch.ones(s.hidden, device=device)
    return LayerWeights(
        attn_norm=ones,
        qkv=random_planes(Q4, q + kv if more else q + 2 * kv, s.hidden, device=device, seed=index),
        v_merged=random_planes(Q6, kv, s.hidden, device=device, seed=index) if more else None,
        q_norm=torch.ones(s.dim, device=device),
        k_norm=torch.ones(s.dim, device=device),
        attn_output=random_planes(Q4, s.hidden, q, device=device, seed=index),
        ffn_norm=ones,
        router=random_planes(F32, s.experts, s.hidden, device=device, seed=index),
        gate=random_planes(Q4, s.experts, s.ff, s.hidden, device=device, seed=index),
        up=random_planes(Q4, s.experts, s.ff, s.hidden, device=device, seed=index + 1000),
        down=random_planes(Q6 if more else Q4, s.experts, s.hidden, s.ff, device=device, seed=index),
    )


class LayerWorkspace:
    """The buffers of batches of n rows."""

    def __init__(self, n: int, s: Shape = SHAPE, device: str = "cuda", *, decode: bool = True) -> None:
        small_batch = n <= INT8_TOKENS
        self.n, self.shape = n, s
        self.blocks = BlockWorkspace(n, s.top_k, s.experts, device)
        gemv = self.blocks.method.up is None
        acts = torch.float32 if small_batch else torch.bfloat16
        wide = torch.float32 if n <= FLOAT_ROWS else torch.bfloat16
        quad_rows = torch.empty(n, s.hidden, dtype=torch.bfloat16, device=device)
        self.quads = QuadWorkspace(n, s.top_k, s.experts, quad_rows) if n in QUAD_ROWS else None
        self.count = torch.tensor([n], dtype=torch.int32, device=device)
        self.x = torch.empty(n, s.hidden, device=device)
        self.y = GpuActivations.empty(n, s.hidden, device, dtype=acts, quantised=gemv)
        self.router_input = self.y.x if small_batch else torch.empty(n, s.hidden, device=device)
        q, kv = s.heads * s.dim, s.kv_heads * s.dim
        self.projected = torch.empty(n, q + 2 * kv, dtype=wide, device=device)
        self.q = torch.empty(n, s.heads, s.dim, dtype=torch.float16, device=device)
        self.attended = GpuActivations.empty(
            n, q, device, dtype=None if small_batch else acts, quantised=small_batch
        )
        self.decode = DecodeWorkspace(n, s.heads, s.kv_heads, s.dim, device) if decode else None
        self.output = torch.empty(n, 1, s.hidden, dtype=wide, device=device)
        self.logits = torch.empty(n, s.experts, device=device)
        # Random weights route all rows alike in the deeper layers; what is timed is a uniform routing instead, another
        # in every layer.
        self.choices = torch.randn(16, n, s.experts, device=device)
        self.ids = torch.empty(n, s.top_k, dtype=torch.int32, device=device)
        self.weights = torch.empty(n, s.top_k, device=device)
        self.h = GpuActivations.empty(n * s.top_k, s.ff, device, dtype=None if gemv else acts, quantised=gemv)
        self.uses_gemv = gemv
        self.parts = torch.empty(n, 1 if gemv else s.top_k, s.hidden, dtype=wide, device=device)


@dataclass
class StepRows:
    """Where the rows of a step are. tiles: of a prefill; None: decode rows."""

    positions: Tensor
    slots: Tensor
    req_slots: Tensor
    table: Tensor
    cos: Tensor
    sin: Tensor
    tiles: Tensor | None = None


def layer(
    w: LayerWeights, workspace: LayerWorkspace, batch: StepRows, keys: Tensor, values: Tensor, index: int
) -> None:
    """x = x + attention, y its norm, experts' products in workspace.parts: the next layer's norm adds them."""
    attention_block(w, workspace, batch, keys, values, first=index == 0)
    experts_block(w, workspace, index)


def attention_block(
    w: LayerWeights, r: LayerWorkspace, batch: StepRows, keys: Tensor, values: Tensor, *, first: bool
) -> None:
    s = r.shape
    sums: Sums = (None, None, None, None) if first else sums_of(r)
    add_norm(r.x, *sums, None, r.count, w.attn_norm, s.eps, r.y.x, r.y.codes, r.y.scales)
    product(r.y, r, w.qkv, r.projected, w.v_merged)
    widths = [s.heads * s.dim, s.kv_heads * s.dim, s.kv_heads * s.dim]
    q, k, v = r.projected.split(widths, dim=1)
    a, d = r.attended, r.decode
    if batch.tiles is None:
        assert d is not None
        new = NewTokens(k, v, w.q_norm, w.k_norm, s.eps, batch.cos, batch.sin, batch.slots)
        decode_attention(
            q, new, keys, values, batch.table, batch.req_slots, batch.positions, r.count, d, a.x, a.codes,
            a.scales,
        )  # fmt: skip
    else:
        assert a.x is not None
        rope_store(
            q, k, v, w.q_norm, w.k_norm, s.eps, batch.cos, batch.sin, batch.positions, batch.slots, r.count, r.q, keys,
            values,
        )  # fmt: skip
        prefill_attention(r.q, keys, values, batch.table, batch.tiles, a.x)
    product(r.attended, r, w.attn_output, r.output.view(r.n, -1))


def product(
    x: GpuActivations, r: LayerWorkspace, p: Planes, out: Tensor, merged: Planes | None = None
) -> None:
    other = None if merged is None else tensors(merged)
    other_kind = 0 if merged is None else int(merged.type)
    linear(x.x, x.codes, x.scales, r.count, tensors(p), int(p.type), other, other_kind, p.cols, out)


def experts_block(w: LayerWeights, r: LayerWorkspace, index: int) -> None:
    s, b = r.shape, r.blocks
    choices = r.choices[index % 16]
    if r.uses_gemv:
        output, router = r.output.view(r.n, -1), w.router.codes[0]
        norm_router(r.x, output, r.count, w.ffn_norm, s.eps, router, r.y.x, r.y.codes, r.y.scales, r.logits)
        route(choices, None, r.count, r.ids, None, r.weights, None)
        small_batch_up(
            r.y.x, r.y.codes, r.y.scales, tensors(w.gate), int(w.gate.type), tensors(w.up), int(w.up.type), s.hidden,
            r.ids, r.h.x, r.h.codes, r.h.scales,
        )  # fmt: skip
        small_batch_down(
            r.h.x, r.h.codes, r.h.scales, tensors(w.down), int(w.down.type), s.ff, r.ids, r.weights,
            r.count, r.parts.view(r.n, -1),
        )  # fmt: skip
        return
    add_norm(
        r.x, r.output, None, None, None, None, r.count, w.ffn_norm, s.eps, r.y.x, r.y.codes, r.y.scales, r.router_input
    )  # fmt: skip
    product(GpuActivations(r.router_input, None, None), r, w.router, r.logits)
    assert r.y.x is not None
    assert r.h.x is not None
    route(choices, None, r.count, r.ids, None, r.weights, None)
    if r.quads is not None:
        quads, routing = r.quads, RouteBlocks(r.quads.expert, r.quads.routes)
        of_up = (tensors(w.gate), int(w.gate.type), tensors(w.up), int(w.up.type), s.hidden)
        align_routes(r.ids, r.count, s.experts, quads.expert, quads.routes)
        quad_order(r.y.x, r.count, quads.x)
        quads_up(quads.x, *of_up, routing, s.top_k, r.h.x, tile=quads.method.up)
        quads_down(r.h.x, tensors(w.down), int(w.down.type), s.ff, routing, r.parts, tile=quads.method.down)
        return
    align_routes(r.ids, r.count, s.experts, b.expert, b.routes)
    experts_up(
        r.y.x, tensors(w.gate), int(w.gate.type), tensors(w.up), int(w.up.type), s.hidden, b.expert, b.routes, s.top_k,
        r.h.x,
    )  # fmt: skip
    experts_down(r.h.x, tensors(w.down), int(w.down.type), s.ff, b.expert, b.routes, r.count, r.parts)


def sums_of(r: LayerWorkspace) -> Sums:
    """What the next norm adds: the experts' parts, their weights and ids where they are not summed yet, and of few rows
    the attention's output."""
    if r.uses_gemv:
        return r.parts, None, None, r.output.view(r.n, -1)
    return r.parts, r.weights, r.ids, None
