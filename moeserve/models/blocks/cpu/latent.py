"""Computes x += output(values(attention(queries, latents))) with latent attention in absorbed form, queued on the
pool's stream.

q = q_b(norm(q_a(y))), or q(y);  latent = kv_a(y)            y = norm(x)
query = [k_b(q without positions) | rotated q]               of each head
cached = [norm(latent) | rotated key]                        one vector for all heads
x += output(v_b(softmax(query . cached) . latents))          v_b: of each head

Some models multiply each head's output by sigmoid(gate(y)). moeserve multiplies the sums of latents instead, which is
the same because v_b is linear. In other models each number of a head's output has a gate of its own.
"""

from __future__ import annotations

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import KvLayer
from moeserve.models.blocks.cpu.forms import CpuForm
from moeserve.models.blocks.cpu.indexer import project_index, store_index
from moeserve.models.blocks.cpu.residual import add_product, read_residual
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.loading.cpu_weights import CpuLatentAttention


def project_latent(
    stream: CpuStream,
    w: CpuLatentAttention,
    shape: LatentAttentionShape,
    eps: float,
    n: int,
    space: CpuWorkspace,
) -> None:
    """Launches the products q and latent of norm(x). eps: added to the mean square under the norm's root; n: rows of
    the step."""
    s = space.latent
    assert s is not None
    read_residual(stream, w.norm, eps, n, space)
    gates = [] if s.gate is None else [s.gate]
    if w.q_b is None:
        stream.linear(space.y, n, w.inputs, [s.q, s.latent, *gates])
    else:
        assert s.q_a is not None
        assert s.q_a_normed is not None
        assert w.q_a_norm is not None
        stream.linear(space.y, n, w.inputs, [s.q_a, s.latent, *gates])
        stream.norm(s.q_a, w.q_a_norm, shape.latent_eps, n, s.q_a_normed)
        stream.linear(s.q_a_normed, n, w.q_b, [s.q])
        if w.indexer is not None and space.indexer is not None:
            project_index(stream, w.indexer, space.y, n, space.indexer)


def store_latent(
    stream: CpuStream,
    w: CpuLatentAttention,
    shape: LatentAttentionShape,
    form: CpuForm,
    kv: KvLayer,
    batch: CpuBatch,
    space: CpuWorkspace,
    *,
    chooses: bool = False,
) -> None:
    """Launches the operation that stores the latents in the KV cache and computes the parts of q that need no product.
    With an indexer, also launches the one that stores the index keys and, if a row `chooses` its keys, computes the
    index queries."""
    s = space.latent
    assert s is not None
    if w.indexer is not None and shape.indexer is not None and space.indexer is not None:
        q_a = s.q_a_normed if chooses else None
        store_index(stream, w.indexer, shape.indexer, form, kv, batch, space.indexer, q_a)
    stream.latent_store(
        s.q, s.latent, w.latent_norm, shape.latent_eps, form.cos, form.sin, batch.kv_slots, kv, batch.n,
        shape.num_heads, shape.scale, s.nope, s.queries.f32, positions=batch.positions,
    )  # fmt: skip


def attend_latent(
    stream: CpuStream,
    w: CpuLatentAttention,
    shape: LatentAttentionShape,
    form: CpuForm,
    kv: KvLayer,
    batch: CpuBatch,
    space: CpuWorkspace,
) -> None:
    """Launches the rest of the block, after `project_latent`."""
    n, s, plan = batch.n, space.latent, form.plans[shape.rule]
    assert s is not None
    store_latent(stream, w, shape, form, kv, batch, space, chooses=plan.chooses)
    if w.indexer is not None and shape.indexer is not None and space.indexer is not None:
        q, weights = space.indexer.q, space.indexer.weights
        stream.choose_keys(plan, q, weights, kv, shape.indexer.num_heads)
    stream.linear_by_head(s.nope, n, w.k_b, s.queries)
    of_heads = s.gate if s.values is None else None
    stream.attention(plan, s.queries.f32, kv, s.attended, form.heads, gate=of_heads)
    if s.values is None:
        stream.linear_by_head(s.attended, n, w.v_b, form.attended)
    else:
        assert s.gate is not None
        stream.linear_by_head(s.attended, n, w.v_b, s.values)
        stream.mix_streams(s.gate, s.values, n, form.attended)  # one stream: values * sigmoid(gate)
    add_product(stream, form.attended, n, w.output, space)
