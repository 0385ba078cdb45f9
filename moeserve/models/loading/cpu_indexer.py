"""Loads a layer's indexer for the CPU."""

from __future__ import annotations

from moeserve.kernels.cpu_stream import LinearGroup
from moeserve.models.indexer import BlockIndexerShape, IndexerShape
from moeserve.models.loading.cpu_residual import LoadMatrix, Vector
from moeserve.models.loading.cpu_weights import CpuBlockIndexer, CpuIndexer
from moeserve.models.sources.gguf import names as n


def load_indexer(
    shape: IndexerShape | None, index: int, vector: Vector, matrix: LoadMatrix
) -> CpuIndexer | None:
    """Loads the indexer of layer `index`, if it has one of its own."""
    if shape is None or shape.keys_from is not None:
        return None
    gate = (n.INDEX_POOLS.gate,) if shape.is_pooled else ()
    parts = (n.INDEXER_K, n.INDEXER_PROJ, *gate)
    return CpuIndexer(
        inputs=LinearGroup([matrix(n.of_layer(index, part)) for part in parts]),
        q_b=LinearGroup([matrix(n.of_layer(index, n.INDEXER_Q_B))]),
        k_norm=vector(n.of_layer(index, n.INDEXER_K_NORM)),
        k_bias=vector(n.bias_of_layer(index, n.INDEXER_K_NORM)),
        ape=vector(n.of_layer(index, n.INDEX_POOLS.bias)) if shape.is_pooled else None,
    )


def load_block_indexer(
    shape: BlockIndexerShape | None, index: int, vector: Vector, matrix: LoadMatrix
) -> CpuBlockIndexer | None:
    """Loads the indexer of layer `index` that chooses blocks, if there is one."""
    if shape is None:
        return None
    parts = (n.INDEXER_Q_PROJ, n.INDEXER_K_PROJ)
    return CpuBlockIndexer(
        inputs=LinearGroup([matrix(n.of_layer(index, part)) for part in parts]),
        q_norm=vector(n.of_layer(index, n.INDEXER_Q_NORM)),
        k_norm=vector(n.of_layer(index, n.INDEXER_K_NORM)),
    )
