"""Qwen3-MoE on the GPU: the same network as `model.py`, as launches on the current stream.

    x = embed(tokens)
    for each layer:
        x = x + attn_output(attention(rope(q_norm(q)), rope(k_norm(k)), v))      q, k, v = qkv(attn_norm(x))
        x = x + sum of the chosen experts' down(silu(gate(y)) * up(y))            y = ffn_norm(x)
    logits = output(output_norm(x))

Experts may be in RAM: the CPU pool computes them while the GPU computes its own (`moeserve.kernels.handoff`). So may
the first layers be, whole: then the weights here are the last layers', counted from 0, and x comes from the CPU.

A block's output is added to x by the norm that comes next, in one launch. Nothing here waits for the GPU, reads from it
or allocates on it, so a step can be recorded in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.op import NewTokens, decode_attention, prefill_attention
from moeserve.kernels.cpu_stream import KvLayer
from moeserve.kernels.embed.op import KvPlaces, embed
from moeserve.kernels.experts.op import align_routes, experts_down, experts_up
from moeserve.kernels.experts.small_batch import small_batch_down, small_batch_up
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.kernels.linear.op import GEMV_TOKENS, linear
from moeserve.kernels.norm.op import add_norm
from moeserve.kernels.planes import GgmlType, Planes
from moeserve.kernels.rope.op import rope_store
from moeserve.kernels.routing.op import norm_router, route, select_streamed_routes
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.models.qwen3moe.expert_stream import ExpertStream
from moeserve.models.qwen3moe.gpu_room import MAX_DECODE_ROWS, Arena, Head, Room, room_bytes, step_sizes
from moeserve.models.qwen3moe.gpu_weights import GpuExperts, GpuLayer, GpuWeights, MergedLinear
from moeserve.models.qwen3moe.rope import rope_tables
from moeserve.models.tap import Tap


@dataclass(frozen=True, slots=True)
class GpuBatch:
    """The rows of a step, on the device, padded to a size of `step_sizes`: int32 [size] each."""

    count: Tensor  # int32 [1]: rows that exist
    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor  # where a row's KV goes
    req_slots: Tensor  # whose row of the slot table it reads
    num_decode: (
        int  # the first rows, each of which attends by itself; of a step of up to SMALL_BATCH_ROWS rows, all
    )
    tiles: Tensor | None  # of the other rows, attention.op.prefill_tiles; None where there are none
    rows_independent: bool = False  # no row attends to another row's token of this step
    streamed: float = 0.0  # part of the experts in RAM that comes to the GPU, instead of the rows to them


SMALL_BATCH_ROWS = GEMV_TOKENS  # a product takes so few quantised, which only decode attention gives it


class GpuQwen3Moe:
    LOGIT_ROWS = 256  # computed at a time: 156 MB at a vocabulary of 151,936

    def __init__(
        self,
        config: Qwen3MoeConfig,
        weights: GpuWeights,
        kv: list[KvLayer],
        slot_table: Tensor,
        max_tokens: int,
        max_model_len: int,
        handoff: ExpertHandoff | None = None,
        expert_stream: ExpertStream | None = None,
        prefill: Sequence[str] | None = None,
        from_cpu: Tensor | None = None,
    ) -> None:
        """slot_table: int32 [requests, length], the KV slots of each request by position. handoff: to the experts in
        RAM, where there are any; expert_stream: the other way, for the layers whose `prefill` is not "cpu". from_cpu:
        float32 [max_tokens, hidden] in pinned memory, where a step's x is instead of coming from an embedding."""
        self.config = config
        self.device = slot_table.device
        self.num_layers = len(weights.layers)
        self._weights = weights
        self._kv = kv
        # x from the CPU is looked up like tokens, row by row, so that a step begins with the same kernel.
        self._first_rows = weights.embedding if from_cpu is None else _as_planes(from_cpu, self.device)
        self._row_numbers = None if from_cpu is None else _numbers(len(from_cpu), self.device)
        self._slot_table = slot_table
        self._handoff = handoff
        self._expert_stream = expert_stream
        # A layer's way of prefill, placement.Prefill: "cpu" never streams, "cuda" whenever there is a prompt.
        self._prefill = (
            ["cpu"] * self.num_layers if expert_stream is None or prefill is None else list(prefill)
        )
        self._num_in_ram = [
            0 if e.expert_map is None else int((e.expert_map < 0).sum()) for e in weights.layers
        ]
        # Of the last step: experts streamed, by layer, and whether any were left to the pool.
        self._streamed = [0] * self.num_layers
        self._pool_works = False
        self._cos, self._sin = (table.to(self.device) for table in rope_tables(config, max_model_len))
        # int64 [layers, experts]: tokens routed to each expert since start.
        self.heat = torch.zeros(self.num_layers, config.num_experts, dtype=torch.int64, device=self.device)
        self.sizes = step_sizes(max_tokens)
        floats = float_type(weights, self.device)
        exact = has_float_weights(weights)
        needed = max(room_bytes(config, size, floats, float_weights=exact) for size in self.sizes)
        arena = Arena(self.device, needed)
        self._rooms = {
            size: Room(config, arena, size, floats, self.device, float_weights=exact) for size in self.sizes
        }
        self.head_sizes = [size for size in self.sizes if size <= self.LOGIT_ROWS]
        logits = torch.empty(self.head_sizes[-1], config.vocab_size, device=self.device)
        self._heads = {size: Head(config, logits, size, floats, self.device) for size in self.head_sizes}

    def begin(self, batch: GpuBatch | None = None) -> None:
        """Before each `forward`, or its replay (None): what the host starts for the experts in RAM. No part of a
        graph."""
        self._streamed = [0 if batch is None else self._to_stream(i, batch) for i in range(self.num_layers)]
        if any(self._streamed):
            assert self._expert_stream is not None
            self._expert_stream.begin(self._streamed)
        self._pool_works = self._handoff is not None and self._streamed != self._num_in_ram
        if self._pool_works:
            assert self._handoff is not None
            self._handoff.begin()

    def _to_stream(self, layer: int, batch: GpuBatch) -> int:
        way, count = self._prefill[layer], self._num_in_ram[layer]
        if way == "cuda":
            return count if batch.tiles is not None else 0
        return round(count * batch.streamed) if way == "auto" else 0

    def check(self) -> None:
        """After a step: raises HandoffError if the CPU failed it, whose results are then worthless."""
        if self._handoff is not None:
            self._handoff.check()

    def forward(self, batch: GpuBatch, tap: Tap | None = None) -> None:
        """Launches all layers. What `logits` then reads stays until the next call. For a tap it waits after every
        layer, which no graph can record."""
        w, r = self._weights, self._rooms[len(batch.token_ids)]
        table = self._first_rows
        assert table is not None
        ids = batch.token_ids if self._row_numbers is None else self._row_numbers[: r.rows]
        places = KvPlaces(self._slot_table, batch.req_slots, batch.positions, batch.kv_slots)
        embed(ids, batch.count, _tensors(table), int(table.type), r.x, places)
        if tap is not None and self._row_numbers is None:
            tap.embedding(r.x)
        for i, layer in enumerate(w.layers):
            self._attention(i, layer, r, batch)
            self._experts(i, layer, r, batch)
            if tap is not None:
                self._show_layer(i, r, tap)

    def logits(self, size: int, rows: Tensor, count: Tensor) -> Tensor:
        """Launches the head for the rows `rows` (int32, padded to a size of head_sizes; count[0] of them exist) of the
        last step, which was of size `size`. Gives float32 [len(rows), vocab], which the next call overwrites."""
        w, r, h = self._weights, self._rooms[size], self._heads[len(rows)]
        self._add_experts(len(w.layers) - 1, r, w.output_norm, count, h.final, rows)
        _multiply(w.output, h.final, count, h.logits)
        return h.logits

    @property
    def can_stream(self) -> bool:
        return self._expert_stream is not None

    @property
    def on_gpu(self) -> Tensor:
        """bool [layers, experts], on the CPU: which experts live in GPU memory."""
        everywhere = torch.ones(self.config.num_experts, dtype=torch.bool)
        maps = [layer.expert_map for layer in self._weights.layers]
        return torch.stack([everywhere if p is None else (p >= 0).cpu() for p in maps])

    def weight_bytes(self, used: Tensor) -> int:
        """Of GPU weights that a step reads which uses these experts: bool [layers, experts], on the CPU."""
        w = self._weights
        total = w.output.nbytes
        for layer, count in zip(w.layers, (used & self.on_gpu).sum(dim=1).tolist(), strict=True):
            total += layer.attn_output.nbytes + layer.router.nbytes + sum(p.nbytes for p in layer.qkv)
            if layer.experts is not None:
                total += layer.experts.nbytes * count // layer.experts.gate.experts
        return total

    def _attention(self, index: int, layer: GpuLayer, r: Room, batch: GpuBatch) -> None:
        eps, count, kv = self.config.rms_eps, batch.count, self._kv[index]
        if index == 0:
            y = r.y
            add_norm(r.x, None, None, None, None, None, count, layer.attn_norm, eps, y.x, y.codes, y.scales)
        else:
            self._add_experts(index - 1, r, layer.attn_norm, count, r.y, None)
        q, k, v = self._project(layer, r, count)
        if batch.rows_independent:
            new = NewTokens(k, v, layer.q_norm, layer.k_norm, eps, self._cos, self._sin, batch.kv_slots)
            self._attend(r, batch, kv, q, new)
        else:
            rope_store(
                q, k, v, layer.q_norm, layer.k_norm, eps, self._cos, self._sin, batch.positions, batch.kv_slots, count,
                r.q, kv.keys, kv.values,
            )  # fmt: skip
            self._attend(r, batch, kv, r.q.view(r.rows, -1), None)
        _multiply(layer.attn_output, r.attended, count, r.output.view(r.rows, -1))

    def _project(self, layer: GpuLayer, r: Room, count: Tensor) -> list[Tensor]:
        """q, k and v [n, ..], parts of the products' outputs."""
        c = self.config
        widths = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        pieces: list[Tensor] = []
        at = 0
        for product in layer.qkv:
            out = r.projected[at : at + r.rows * product.rows].view(r.rows, product.rows)
            at += out.numel()
            _multiply(product, r.y, count, out)
            column = 0
            while column < product.rows:
                width = widths[len(pieces)]
                pieces.append(out[:, column : column + width])
                column += width
        return pieces

    def _attend(self, r: Room, batch: GpuBatch, kv: KvLayer, q: Tensor, new: NewTokens | None) -> None:
        a, d = r.attended, r.decode
        assert a.x is not None
        for first in range(0, batch.num_decode, MAX_DECODE_ROWS):
            part = slice(first, min(first + MAX_DECODE_ROWS, batch.num_decode))
            codes = None if a.codes is None else a.codes[part]
            scales = None if a.scales is None else a.scales[part]
            mine = None if new is None else replace(new, k=new.k[part], v=new.v[part], slots=new.slots[part])
            decode_attention(
                q[part], mine, kv.keys, kv.values, self._slot_table, batch.req_slots[part], batch.positions[part],
                batch.count, d.sums, d.stats, d.counters, a.x[part], codes, scales,
            )  # fmt: skip
        if batch.tiles is not None:
            prefill_attention(r.q, kv.keys, kv.values, self._slot_table, batch.tiles, a.x)

    def _experts(self, index: int, layer: GpuLayer, r: Room, batch: GpuBatch) -> None:
        count = batch.count
        self._route(layer, r, count)
        local = None if layer.expert_map is None else r.local_expert_ids
        route(r.router_logits, layer.expert_map, count, r.ids, local, r.weights, self.heat[index])
        if layer.expert_map is None:
            assert layer.experts is not None
            self._run_experts(layer.experts, r.ids, r, count)
        else:
            self._share_experts(index, layer, r, count)

    def _route(self, layer: GpuLayer, r: Room, count: Tensor) -> None:
        """y, the norm of x with the attention's output, and the router's logits."""
        y, eps = r.y, self.config.rms_eps
        if _fuses_router_norm(layer, r):
            router = layer.router.first.codes[0]
            x, output = r.x, r.output.view(r.rows, -1)
            norm_router(
                x, output, count, layer.ffn_norm, eps, router, y.x, y.codes, y.scales, r.router_logits
            )
            return
        exact = None if r.exact_y is y.x else r.exact_y
        add_norm(
            r.x, r.output, None, None, None, None, count, layer.ffn_norm, eps, y.x, y.codes, y.scales, exact
        )  # fmt: skip
        into_router = y if layer.router.first.quantised else GpuActivations(r.exact_y, None, None)
        _multiply(layer.router, into_router, count, r.router_logits)

    def _share_experts(self, index: int, layer: GpuLayer, r: Room, count: Tensor) -> None:
        """The pool computes its experts while the GPU computes its own, then those that are streamed to it (which is
        not for a graph). Where the pool takes part in a step it expects all layers, those too that leave it nothing."""
        stream = self._expert_stream if self._streamed[index] else None
        if self._pool_works:
            assert self._handoff is not None
            left = None if stream is None else stream.left(index)
            self._handoff.publish(index, r.exact_y, r.ids, r.weights, left)
        if layer.experts is not None:
            self._run_experts(layer.experts, r.local_expert_ids, r, count)
        if stream is not None:
            # From here on r.local_expert_ids only says whether a route's part is here.
            select_streamed_routes(r.ids, stream.expert_map(index), r.streamed, r.local_expert_ids)
            self._run_experts(stream.take(index), r.streamed, r, count, adds=layer.experts is not None)
        if self._pool_works:
            assert self._handoff is not None
            self._handoff.collect(index, r.from_cpu)

    def _run_experts(
        self, experts: GpuExperts, places: Tensor, r: Room, count: Tensor, *, adds: bool = False
    ) -> None:
        """r.parts of the routes whose place in `experts` is not below 0. adds: where a token has one part, it holds
        others' sum already."""
        gate, up, down = experts.gate, experts.up, experts.down
        matrices = (_tensors(gate), int(gate.type), _tensors(up), int(up.type), self.config.hidden_size)
        of_down = (_tensors(down), int(down.type), self.config.expert_ff)
        h, b = r.h, r.blocks
        if r.uses_gemv:
            h = GpuActivations(None, h.codes, h.scales) if down.quantised else GpuActivations(h.x, None, None)
            small_batch_up(
                r.y.x, r.y.codes, r.y.scales, *matrices, places, h.x, h.codes, h.scales
            )  # fmt: skip
            small_batch_down(
                h.x, h.codes, h.scales, *of_down, places, r.weights, count, r.parts.view(r.rows, -1), adds=adds
            )  # fmt: skip
            return
        assert r.y.x is not None
        assert h.x is not None
        align_routes(places, count, gate.experts, b.expert, b.routes)
        experts_up(r.y.x, *matrices, b.expert, b.routes, self.config.top_k, h.x)
        experts_down(h.x, *of_down, b.expert, b.routes, count, r.parts)

    def _add_experts(
        self, index: int, r: Room, weight: Tensor, count: Tensor, y: GpuActivations, rows: Tensor | None
    ) -> None:
        """x += the experts' outputs of layer `index`, and the norm of that; of `rows` alone, x stays as it was."""
        parts, weights, places, extra = self._outputs(index, r)
        if _fuses_router_norm(self._weights.layers[index], r):
            extra = r.output.view(r.rows, -1)  # still to be added
        add_norm(
            r.x, parts, weights, places, extra, rows, count, weight, self.config.rms_eps, y.x, y.codes, y.scales
        )  # fmt: skip

    def _outputs(
        self, index: int, r: Room
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """What layer `index`'s experts have left to be added to x: parts by their weights, those whose place is not
        below 0 (None: all, as they are), and the pool's sum."""
        layer = self._weights.layers[index]
        is_shared = layer.expert_map is not None
        parts = r.parts if layer.experts is not None or self._streamed[index] else None
        weights, places = (
            (None, None) if r.uses_gemv else (r.weights, r.local_expert_ids if is_shared else r.ids)
        )
        return parts, weights, places, r.from_cpu if is_shared and self._pool_works else None

    def _show_layer(self, index: int, r: Room, tap: Tap) -> None:
        """Sums are made on the CPU: the GPU's memory is all planned."""
        parts, weights, places, from_cpu = self._outputs(index, r)
        output = torch.zeros(r.rows, self.config.hidden_size) if from_cpu is None else from_cpu.cpu()
        if parts is not None:
            each = parts.cpu().float()  # under Triton's interpreter the very tensor that the next norm adds
            if weights is not None:
                each = each * weights.cpu()[:, :, None]
            if places is not None:
                each = each.masked_fill(places.cpu()[:, :, None] < 0, 0.0)
            output = output + each.sum(dim=1)
        after_attention = r.x
        if _fuses_router_norm(self._weights.layers[index], r):
            after_attention = r.x.cpu() + r.output.view(r.rows, -1).cpu().float()
        first = self.config.num_layers - self.num_layers  # the CPU has shown those before
        tap.layer(
            first + index,
            after_attention=after_attention,
            expert_input=r.exact_y,
            router_logits=r.router_logits,
            expert_ids=r.ids,
            expert_weights=r.weights,
            expert_output=output,
        )


def _fuses_router_norm(layer: GpuLayer, r: Room) -> bool:
    """The norm before the router and its product are one kernel, and the next norm adds the attention's output."""
    return r.uses_gemv and layer.expert_map is None and not layer.router.first.quantised


def _multiply(product: MergedLinear, x: GpuActivations, count: Tensor, out: Tensor) -> None:
    first, second = product.first, product.second
    linear(
        x.x, x.codes, x.scales, count, _tensors(first), int(first.type), None if second is None else _tensors(second),
        0 if second is None else int(second.type), first.cols, out,
    )  # fmt: skip


def _as_planes(rows: Tensor, device: torch.device) -> Planes:
    """Of floats, wherever they lie."""
    empty = torch.empty(0, dtype=torch.int32, device=device)
    count, cols = rows.shape
    return Planes(GgmlType.F32, 1, count, cols, rows[None], empty, empty)


def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _tensors(planes: Planes) -> list[Tensor]:
    return [planes.codes, planes.scales, planes.supers]


def has_float_weights(weights: GpuWeights) -> bool:
    """Of attention or experts. (The router's always are.)"""
    matrices = [layer.attn_output.first for layer in weights.layers]
    matrices += [m for layer in weights.layers if (e := layer.experts) is not None for m in (e.gate, e.down)]
    return not all(m.quantised for m in matrices)


def float_type(weights: GpuWeights, device: torch.device) -> torch.dtype:
    """What the tensor cores multiply where rows are many. bfloat16 cannot overflow and rounds finer than the int8 of
    few rows; where there are float16 weights it would lose three of their bits, so they get float16. Triton's
    interpreter has no bfloat16."""
    if device.type != "cuda":
        return torch.float32
    matrices = [m for layer in weights.layers for m in (layer.router.first, layer.attn_output.first)]
    matrices += [e.gate for e in (layer.experts for layer in weights.layers) if e is not None]
    has_halves = any(m.type == GgmlType.F16 for m in matrices)
    return torch.float16 if has_halves else torch.bfloat16
