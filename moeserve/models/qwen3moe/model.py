"""Qwen3-MoE on the CPU pool.

    x = embed(tokens)
    for each layer:
        x = x + attn_output(attention(rope(q_norm(q)), rope(k_norm(k)), v))      q, k, v = qkv(attn_norm(x))
        x = x + sum of the chosen experts' down(silu(gate(y)) * up(y))            y = ffn_norm(x)
    logits = output(output_norm(x))

Everything is queued on the stream; `CpuStream.wait` before reading a result. With weights of the first layers alone, x
is the result, and there are no logits: a GPU goes on from there (`worker/first_layers.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from moeserve.kernels.cpu_stream import (
    Activations,
    AttentionPlan,
    CpuStream,
    Heads,
    KvLayer,
    RoutingWorkspace,
)
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.models.qwen3moe.rope import rope_tables
from moeserve.models.qwen3moe.weights import LayerWeights, Weights
from moeserve.models.tap import Tap


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step, on the host. `plan` describes their sequences to attention."""

    n: int
    token_ids: torch.Tensor  # int32 [n]
    positions: torch.Tensor  # int64 [n]
    kv_slots: torch.Tensor  # int32 [n]: where each row's KV goes
    plan: AttentionPlan


class Room:
    """The buffers of a step of up to `tokens` rows. One owner: the model; every layer reuses them."""

    def __init__(
        self, config: Qwen3MoeConfig, weights: Weights, tokens: int, logit_rows: int, *, pinned: bool
    ) -> None:
        c = config
        experts = [layer.experts for layer in weights.layers]
        self.x = torch.empty(tokens, c.hidden_size, pin_memory=pinned)  # the residual stream
        self.y = Activations(tokens, c.hidden_size)  # its norm, the input of every block
        self.q = torch.empty(tokens, c.num_heads * c.head_dim)
        self.k = torch.empty(tokens, c.num_kv_heads * c.head_dim)
        self.v = torch.empty(tokens, c.num_kv_heads * c.head_dim)
        self.cos = torch.empty(tokens, c.head_dim // 2)
        self.sin = torch.empty(tokens, c.head_dim // 2)
        self.attended = Activations(tokens, c.num_heads * c.head_dim)
        self.router_logits = torch.empty(tokens, c.num_experts)
        self.routing = RoutingWorkspace(tokens, c.num_experts, c.top_k)
        self.h = Activations(
            tokens * c.top_k,
            c.expert_ff,
            f32=any(not e.down.integer for e in experts),
            q8=any(e.down.integer for e in experts),
        )
        self.final = Activations(logit_rows, c.hidden_size)
        self.logits = torch.empty(logit_rows, c.vocab_size)


class Qwen3Moe:
    LOGIT_ROWS = 64  # rows of logits computed at a time: 39 MB at a vocabulary of 151,936

    def __init__(
        self,
        config: Qwen3MoeConfig,
        weights: Weights,
        stream: CpuStream,
        kv: list[KvLayer],
        max_tokens: int,
        max_model_len: int,
        *,
        pinned: bool = False,
    ) -> None:
        """pinned: a GPU reads x."""
        self.config = config
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._weights = weights
        self._stream = stream
        self._kv = kv
        # int64 [layers, 2, experts]: tokens routed to each expert, and steps that read its weights, since start.
        self.heat = torch.zeros(len(weights.layers), 2, config.num_experts, dtype=torch.int64)
        logit_rows = 0 if weights.head is None else self.LOGIT_ROWS
        self._room = Room(config, weights, max_tokens, logit_rows, pinned=pinned)
        self._forwards = 0
        self._heads = 0
        self._cos, self._sin = rope_tables(config, max_model_len)

    def forward(self, batch: Batch, tap: Tap | None = None) -> None:
        """Queues all layers for up to max_tokens rows. The residual stream then holds what `logits` reads. For a tap
        it waits after every layer."""
        self._forwards += 1
        room, table, n = self._room, self._weights.embedding, batch.n
        torch.index_select(self._cos, 0, batch.positions, out=room.cos[:n])
        torch.index_select(self._sin, 0, batch.positions, out=room.sin[:n])
        self._stream.embed(table.table, table.ggml_type, batch.token_ids, n, room.x)
        if tap is not None:
            self._stream.wait()
            tap.embedding(room.x)
        for i, (layer, kv) in enumerate(zip(self._weights.layers, self._kv, strict=True)):
            self._attention(layer, kv, batch)
            if tap is None:
                self._experts(layer, self.heat[i], n)
            else:
                self._show_experts(i, layer, n, tap)

    @property
    def x(self) -> torch.Tensor:
        """float32 [max_tokens, hidden]: the residual stream behind the last layer of `forward`, until the next one."""
        return self._room.x

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Queues the head for up to LOGIT_ROWS rows of the last step. rows: int32 [m]. Gives float32 [m, vocab],
        a view that the next call, which must come after a wait, overwrites."""
        room, head, m = self._room, self._weights.head, len(rows)
        assert head is not None
        self._heads += 1
        self._stream.norm(room.x, head.norm, self.config.rms_eps, m, room.final, rows)
        self._stream.linear(room.final, m, head.output, [room.logits])
        return room.logits[:m]

    def weight_bytes_read(self) -> int:
        """Bytes of weights that all calls so far had to read: each distinct expert once a step."""
        w = self._weights
        reads = self.heat[:, 1].sum(dim=1).tolist()
        experts = sum(n * layer.experts.bytes_each for n, layer in zip(reads, w.layers, strict=True))
        heads = 0 if w.head is None else self._heads * w.head.bytes
        return self._forwards * w.dense_bytes + heads + int(experts)

    def read_experts(self) -> tuple[float, int]:
        """One plain read of all experts' weights, without computing anything: seconds taken, bytes read."""
        start = time.perf_counter()
        for layer in self._weights.layers:
            for matrix in layer.experts.matrices:
                self._stream.read(matrix)
        self._stream.wait()
        nbytes = sum(layer.experts.bytes_each * self.config.num_experts for layer in self._weights.layers)
        return time.perf_counter() - start, nbytes

    def _attention(self, layer: LayerWeights, kv: KvLayer, batch: Batch) -> None:
        s, room, n, eps = self._stream, self._room, batch.n, self.config.rms_eps
        s.norm(room.x, layer.attn_norm, eps, n, room.y)
        s.linear(room.y, n, layer.qkv, [room.q, room.k, room.v])
        s.rope_store(
            room.q,
            room.k,
            room.v,
            layer.q_norm,
            layer.k_norm,
            eps,
            room.cos,
            room.sin,
            batch.kv_slots,
            kv,
            n,
            self.heads,
        )
        s.attention(batch.plan, room.q, kv, room.attended, self.heads)
        s.linear(room.attended, n, layer.attn_output, [room.x], add=True)

    def _experts(self, layer: LayerWeights, heat: torch.Tensor, n: int) -> None:
        s, room, e = self._stream, self._room, layer.experts
        s.norm(room.x, layer.ffn_norm, self.config.rms_eps, n, room.y)
        s.linear(room.y, n, layer.router, [room.router_logits])
        s.route(room.router_logits, n, room.routing)
        s.experts(e.gate, e.up, e.down, room.y, n, room.routing, room.h, heat, room.x)

    def _show_experts(self, index: int, layer: LayerWeights, n: int, tap: Tap) -> None:
        """The same, waited for. The kernels add to x at once, so the tap gets the difference."""
        room, s = self._room, self._stream
        s.wait()
        after_attention = room.x[:n].clone()
        self._experts(layer, self.heat[index], n)
        s.wait()
        tap.layer(
            index,
            after_attention=after_attention,
            expert_input=room.y.f32,
            router_logits=room.router_logits,
            expert_ids=room.routing.ids,
            expert_weights=room.routing.weights,
            expert_output=room.x[:n] - after_attention,
        )
