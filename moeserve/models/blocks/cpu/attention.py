"""Attention on the pool's stream: x += output(attention(rope(q), rope(k), v)) with q, k, v = qkv(norm(x)).

Gated attention multiplies its output by a function of gate(norm(x)). Sandwiched blocks normalise their output before
it is added. A layer that shares an earlier layer's k and v computes only q. An indexer chooses the keys that rows
attend to.
"""

from __future__ import annotations

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import KvLayer
from moeserve.models.attention import AttentionShape
from moeserve.models.blocks.cpu.forms import CpuForm
from moeserve.models.blocks.cpu.indexer import choose_blocks
from moeserve.models.blocks.cpu.lora import LayerAdapters, project
from moeserve.models.blocks.cpu.residual import add_block, block_output, read_residual
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.loading.cpu_weights import CpuAttention
from moeserve.models.sources.gguf import names


def project_qkv(
    stream: CpuStream,
    w: CpuAttention,
    shape: AttentionShape,
    form: CpuForm,
    eps: float,
    n: int,
    space: CpuWorkspace,
    adapters: LayerAdapters | None,
) -> None:
    """Launches the products q, k and v of norm(x). eps: added to the mean square under the norm's root; n: rows of the
    step."""
    read_residual(stream, w.norm, eps, n, space)
    outputs = [form.q, form.k, form.v][: len(shape.qkv_parts)]
    projected = [*outputs, space.gates[shape.gate_width]] if shape.gate_width else outputs
    project(stream, space.y, n, w.qkv, projected, adapters, shape.qkv_parts)
    if w.indexer is not None:
        assert space.indexer is not None
        stream.linear(space.y, n, w.indexer.inputs, [space.indexer.q, space.indexer.keys])


def store_kv(
    stream: CpuStream,
    w: CpuAttention,
    shape: AttentionShape,
    form: CpuForm,
    eps: float,
    kv: KvLayer,
    batch: CpuBatch,
) -> None:
    """Launches the operations that normalise and rotate q and k, and store k and v in the KV cache. eps: added to the
    mean square under the norm's root."""
    slots = batch.kv_slots
    if shape.window and batch.window_slots is not None:
        slots = batch.window_slots
    cos, sin, positions = form.angles_at(batch.positions)
    k, v = (form.k, form.v) if shape.kv_from is None else (None, None)
    stream.rope_store(
        form.q, k, v, w.q_norm, w.k_norm, eps, cos, sin, slots, kv, batch.n, form.heads,
        scale=shape.scale, v_norm=w.v_norm, v_from_k=shape.v_from_k, v_scale=shape.v_scale,
        norm_after=shape.norm_after, positions=positions,
    )  # fmt: skip


def attend(
    stream: CpuStream,
    w: CpuAttention,
    shape: AttentionShape,
    form: CpuForm,
    eps: float,
    kv: KvLayer,
    batch: CpuBatch,
    space: CpuWorkspace,
    adapters: LayerAdapters | None,
) -> None:
    """Launches the rest of the block, after `project_qkv`. eps: added to the mean square under the norm's root."""
    n, plan = batch.n, form.plans[shape.rule]
    if shape.window and batch.has_window_plan:
        plan = form.window_plan
    store_kv(stream, w, shape, form, eps, kv, batch)
    if w.indexer is not None:
        assert shape.indexer is not None
        assert space.indexer is not None
        choose_blocks(stream, w.indexer, shape.indexer, form, eps, kv, batch, space.indexer)
    stream.attention(
        plan, form.q, kv, form.attended, form.heads, window=shape.window, sinks=w.sinks,
        gate=space.gates.get(shape.gate_width), gate_softplus=shape.gate == "head_softplus",
        score_cap=shape.score_cap,
    )  # fmt: skip
    if w.output_norm is None:
        out, add = block_output(space)
        project(stream, form.attended, n, w.output, [out], adapters, (names.ATTN_OUTPUT,), add=add)
        add_block(stream, n, space)
        return
    assert space.sandwich is not None
    block = space.sandwich.block
    project(stream, form.attended, n, w.output, [block], adapters, (names.ATTN_OUTPUT,))
    stream.add_norm(block, w.output_norm, space.sandwich.eps, n, space.x)
