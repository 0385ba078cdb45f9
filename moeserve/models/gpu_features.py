"""Checks for model features that the GPU engine does not support, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.indexer import IndexerShape
from moeserve.models.interface import LayerShape, ModelShape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

# Feature name → test whether a layer has it.
_CPU_ONLY: Final[Mapping[str, Callable[[LayerShape], bool]]] = {
    "weights of several experts' input": lambda layer: (
        layer.moe is not None and layer.moe.weighs_input and layer.moe.top_k > 1
    ),
}


def gpu_shape(shape: ModelShape, max_model_len: int | None) -> ModelShape:
    """Returns the shape as the GPU engine computes it for requests of up to max_model_len tokens (None: up to the
    model's context length). If no request can have more keys than the indexer chooses, the returned shape has no
    indexer: it would always choose all keys."""
    indexer = shape.indexer
    if indexer is None:
        return shape
    if max_model_len is None or max_model_len > indexer.rule.most_dense:
        return shape
    length = min(shape.context_length, indexer.rule.most_dense)
    return replace(shape, layers=tuple(map(_without_indexer, shape.layers)), context_length=length)


def gpu_drafting_shape(shape: ModelShape, method: str | None) -> ModelShape:
    """Returns the shape with a next-token block that attends to all keys: it computes few rows, which read all keys
    faster than an indexer chooses some. With `method` "auto" (see `drafting_shape`), a block that only the CPU can
    compute is left out."""
    if shape.next_token_layer is None:
        return shape
    if method == "auto" and shape.cpu_only_block is not None:
        return replace(shape, next_token_layer=None)
    return replace(shape, next_token_layer=_without_indexer(shape.next_token_layer))


def _without_indexer(layer: LayerShape) -> LayerShape:
    attention = layer.attention
    if attention is None or attention.indexer is None:
        return layer
    if isinstance(attention, AttentionShape):
        return replace(layer, mixer=replace(attention, indexer=None), unused=n.BLOCK_INDEXER)
    of_pools = (n.of_part(n.INDEX_POOLS.gate), n.of_part(n.INDEX_POOLS.bias))
    is_pooled = isinstance(attention.indexer, IndexerShape) and attention.indexer.is_pooled
    unused = (*n.INDEXER, *(of_pools if is_pooled else ()))
    return replace(layer, mixer=replace(attention, indexer=None), unused=unused)


def cpu_only_features(shape: ModelShape) -> list[str]:
    """Returns the model's features that only the CPU engine computes."""
    found = [what for what, has in _CPU_ONLY.items() if any(map(has, shape.layers))]
    of_model = {
        "LayerNorm in layers that are not parallel": shape.centers_norms
        and not all(layer.is_parallel for layer in shape.layers),
    }
    return [*found, *(what for what, has in of_model.items() if has)]


def check_gpu_features(source: ModelSource, shape: ModelShape) -> None:
    """Raises ModelError if the model has such a feature."""
    if found := cpu_only_features(shape):
        raise ModelError(
            source.path,
            f"architecture {shape.architecture!r} has features that so far only the CPU engine supports "
            f"({', '.join(found)}): run the model with --device cpu",
        )
