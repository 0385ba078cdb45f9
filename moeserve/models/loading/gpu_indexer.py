"""Loads a layer's indexer for a GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moeserve.models.indexer import BlockIndexerShape, IndexerShape
from moeserve.models.loading.gpu_weights import GpuBlockIndexer, GpuIndexer
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.sources.gguf import names as n


def load_indexer(
    shape: IndexerShape | None,
    index: int,
    vector: Callable[[str], Tensor],
    merged: Callable[..., list[MergedLinear]],
) -> GpuIndexer | None:
    """Loads and returns the indexer of layer `index`, counted from 0; None if it has none of its own. vector: loads a
    vector; merged: loads matrices over the same input; both take full names."""
    if shape is None or shape.keys_from is not None:
        return None
    (q_b,) = merged(n.of_layer(index, n.INDEXER_Q_B))
    gate = (n.INDEX_POOLS.gate,) if shape.is_pooled else ()
    return GpuIndexer(
        inputs=merged(*(n.of_layer(index, part) for part in (n.INDEXER_K, n.INDEXER_PROJ, *gate))),
        q_b=q_b,
        k_norm=vector(n.of_layer(index, n.INDEXER_K_NORM)),
        k_bias=vector(n.bias_of_layer(index, n.INDEXER_K_NORM)),
        ape=vector(n.of_layer(index, n.INDEX_POOLS.bias)) if shape.is_pooled else None,
    )


def load_block_indexer(
    shape: BlockIndexerShape | None,
    index: int,
    vector: Callable[[str], Tensor],
    merged: Callable[..., list[MergedLinear]],
) -> GpuBlockIndexer | None:
    """Loads and returns the indexer of layer `index`, counted from 0, that chooses blocks of keys; None if there is
    none. vector, merged: as for `load_indexer`."""
    if shape is None:
        return None
    return GpuBlockIndexer(
        inputs=merged(*(n.of_layer(index, part) for part in (n.INDEXER_Q_PROJ, n.INDEXER_K_PROJ))),
        q_norm=vector(n.of_layer(index, n.INDEXER_Q_NORM)),
        k_norm=vector(n.of_layer(index, n.INDEXER_K_NORM)),
    )
