"""Loads a layer's indexer for a GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moeserve.models.indexer import IndexerShape
from moeserve.models.loading.gpu_weights import GpuIndexer, MergedLinear
from moeserve.models.sources.gguf import names as n


def load_indexer(
    shape: IndexerShape | None,
    index: int,
    vector: Callable[[str], Tensor],
    merged: Callable[..., list[MergedLinear]],
) -> GpuIndexer | None:
    """Loads the indexer of layer `index`, if it has one of its own. vector, merged: load a vector, and matrices over
    the same input, by their full names."""
    if shape is None or shape.keys_from is not None:
        return None
    (q_b,) = merged(n.of_layer(index, n.INDEXER_Q_B))
    return GpuIndexer(
        inputs=merged(*(n.of_layer(index, part) for part in (n.INDEXER_K, n.INDEXER_PROJ))),
        q_b=q_b,
        k_norm=vector(n.of_layer(index, n.INDEXER_K_NORM)),
        k_bias=vector(n.bias_of_layer(index, n.INDEXER_K_NORM)),
    )
