"""Indexers, queued on the pool's stream: choose the keys that the step's rows attend to. y = norm(x).

Of latent attention:
    index key = rotated LayerNorm(attn_k(y));  index query = rotated attn_q_b(compressed q)
    score of a key = sum over the heads of proj(y) ReLU(query . key)
    or index keys of blocks, which are pooled and do not rotate:  kernels/indexer/pools.py
Of blocks:
    index key = rotated norm(k_proj(y));  index query = rotated norm(q_proj(y));  kernels/indexer/blocks.py
"""

from __future__ import annotations

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import Activations, KvLayer
from moeserve.models.blocks.cpu.forms import CpuForm
from moeserve.models.blocks.cpu.workspace import CpuBatch, IndexerWorkspace
from moeserve.models.indexer import BlockIndexerShape, IndexerShape
from moeserve.models.loading.cpu_weights import CpuBlockIndexer, CpuIndexer


def project_index(stream: CpuStream, w: CpuIndexer, y: Activations, n: int, space: IndexerWorkspace) -> None:
    """Launches the indexer's products of y = norm(x). n: rows of the step."""
    gates = [] if w.ape is None else [space.gates]
    stream.linear(y, n, w.inputs, [space.keys, space.weights, *gates])


def store_index(
    stream: CpuStream,
    w: CpuIndexer,
    shape: IndexerShape,
    form: CpuForm,
    kv: KvLayer,
    batch: CpuBatch,
    space: IndexerWorkspace,
    q_a: Activations | None,
) -> None:
    """Launches the storing of the rows' index keys in the KV cache, after `project_index`, and the computation of their
    index queries, from which `CpuStream.choose_keys` chooses. q_a: the compressed q, normalised; None if no row of the
    step chooses, because its context is no longer than the number of keys to choose: then no queries are computed."""
    if q_a is not None:
        stream.linear(q_a, batch.n, w.q_b, [space.q])
    if w.ape is not None:
        plan = form.plans[shape.rule]
        stream.index_pools(plan, space.keys, space.gates, w.k_norm, w.k_bias, shape.eps, w.ape, kv)
        return
    stream.index_store(
        None if q_a is None else space.q, space.keys, w.k_norm, w.k_bias, shape.eps, form.cos, form.sin,
        batch.kv_slots, kv, batch.n, shape.num_heads, in_pairs=shape.in_pairs, positions=batch.positions,
    )  # fmt: skip


def choose_blocks(
    stream: CpuStream,
    w: CpuBlockIndexer,
    shape: BlockIndexerShape,
    form: CpuForm,
    eps: float,
    kv: KvLayer,
    batch: CpuBatch,
    space: IndexerWorkspace,
) -> None:
    """Launches the storing of index keys in the KV cache and the choice, after the products of `w.inputs`. eps: added
    to the mean square under the norm's root."""
    plan = form.plans[shape.rule]
    firsts, (cos, sin) = None, (form.cos, form.sin)
    if batch.first_positions is not None:
        firsts, (cos, sin) = form.row_angles(batch.first_positions), form.row_angles(batch.positions)
    stream.index_blocks(
        plan, space.q, space.keys, w.q_norm, w.k_norm, eps, cos, sin, kv, shape.num_heads, first_angles=firsts
    )
    stream.choose_keys(plan, space.q, None, kv, shape.num_heads)
