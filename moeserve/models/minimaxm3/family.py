"""MiniMax-M3 (https://huggingface.co/MiniMaxAI/MiniMax-M3), text only.

q and k are normalised per head; part of each head rotates. First layers without experts, then DeepSeek-V3's router
without groups, and an ungated shared expert. Every feed-forward has gpt-oss's activation.

In layers with experts, the model's indexer chooses blocks of keys for each query. Here every query attends to all
keys. That is the same as long as there are no more blocks than the indexer chooses. So contexts are limited to that
length, and the indexer's weights are not read.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.interface import (
    AttentionShape,
    DenseFfnShape,
    LayerShape,
    ModelFamily,
    ModelShape,
    MoeShape,
)
from moeserve.models.minimaxm3.hugging_face import MAPPING
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

# The published model's values: files converted before llama.cpp supported the indexer have neither key.
CHOSEN_BLOCKS = 16
BLOCK_KEYS = 128


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError. The architecture implies the activation; no key states
    it."""
    reader = ShapeReader(source)
    num_heads, num_kv_heads, head_dim = reader.heads(rotates_whole=False)
    attention = AttentionShape(
        num_heads, num_kv_heads, head_dim, qk_norm="head", rotated=reader.rotated(head_dim)
    )
    shape = reader.model(
        tuple(_layer(attention, ffn) for ffn in reader.sigmoid_mixtures(normalize=True)),
    )
    blocks = reader.integer("attention.indexer.top_k", 1, 1 << 16, default=CHOSEN_BLOCKS)
    block_keys = reader.integer("attention.indexer.block_size", 1, 1 << 16, default=BLOCK_KEYS)
    return replace(shape, context_length=min(shape.context_length, blocks * block_keys))


def _layer(attention: AttentionShape, ffn: MoeShape | DenseFfnShape) -> LayerShape:
    if isinstance(ffn, DenseFfnShape):
        return LayerShape(attention, replace(ffn, activation="swiglu_oai"))
    shared = None if ffn.shared is None else replace(ffn.shared, activation="swiglu_oai")
    ffn = replace(ffn, shared=shared, activation="swiglu_oai")
    return LayerShape(attention, ffn, unread=n.BLOCK_INDEXER)


FAMILY = ModelFamily(architecture="minimax-m3", read_shape=read_shape, hugging_face=MAPPING)
