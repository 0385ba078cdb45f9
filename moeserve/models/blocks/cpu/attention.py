"""x += output(attention(rope(q), rope(k), v)) with q, k, v = qkv(norm(x)), queued on the pool's stream. Where
attention is gated, its output is multiplied by sigmoid(gate(norm(x)))."""

from __future__ import annotations

from moeserve.adapters.products import QKV_PARTS
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import Heads, KvLayer
from moeserve.models.blocks.cpu.lora import LayerAdapters, project
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.interface import AttentionShape
from moeserve.models.loading.cpu_weights import CpuAttention
from moeserve.models.sources.gguf import names


def attend(
    stream: CpuStream,
    w: CpuAttention,
    shape: AttentionShape,
    heads: Heads,
    eps: float,
    kv: KvLayer,
    batch: CpuBatch,
    space: CpuWorkspace,
    adapters: LayerAdapters | None,
) -> None:
    n = batch.n
    stream.norm(space.x, w.norm, eps, n, space.y)
    gate = space.gate if shape.is_gated else None
    outputs = [space.q, space.k, space.v]
    projected = outputs if gate is None else [*outputs, gate]
    project(stream, space.y, n, w.qkv, projected, adapters, QKV_PARTS)
    stream.rope_store(
        space.q, space.k, space.v, w.q_norm, w.k_norm, eps, space.cos, space.sin, batch.kv_slots, kv, n, heads
    )  # fmt: skip
    stream.attention(
        batch.plan, space.q, kv, space.attended, heads, window=shape.window, sinks=w.sinks, gate=gate
    )
    project(stream, space.attended, n, w.output, [space.x], adapters, (names.ATTN_OUTPUT,), add=True)
