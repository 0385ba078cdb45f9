"""The indexer of latent attention, queued on the pool's stream: chooses the keys that the step's rows attend to.

index key = rotated LayerNorm(attn_k(y));  index query = rotated attn_q_b(compressed q)      y = norm(x)
score of a key = sum over the heads of proj(y) ReLU(query . key)
"""

from __future__ import annotations

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import Activations, KvLayer
from moeserve.models.blocks.cpu.forms import CpuForm
from moeserve.models.blocks.cpu.workspace import CpuBatch, IndexerWorkspace
from moeserve.models.indexer import IndexerShape
from moeserve.models.loading.cpu_weights import CpuIndexer


def project_index(
    stream: CpuStream, w: CpuIndexer, y: Activations, q_a: Activations, n: int, space: IndexerWorkspace
) -> None:
    """Launches the indexer's products. y: norm(x); q_a: the compressed q, normalised."""
    stream.linear(y, n, w.inputs, [space.keys, space.weights])
    stream.linear(q_a, n, w.q_b, [space.q])


def store_index(
    stream: CpuStream,
    w: CpuIndexer,
    shape: IndexerShape,
    form: CpuForm,
    kv: KvLayer,
    batch: CpuBatch,
    space: IndexerWorkspace,
) -> None:
    """Launches the storing of index keys in the KV cache, after `project_index`; then `CpuStream.choose_keys` can
    choose."""
    stream.index_store(
        space.q, space.keys, w.k_norm, w.k_bias, shape.eps, form.cos, form.sin, batch.kv_slots, kv, batch.n,
        shape.num_heads, in_pairs=shape.in_pairs, positions=batch.positions,
    )  # fmt: skip
