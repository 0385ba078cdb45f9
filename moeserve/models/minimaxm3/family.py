"""MiniMax-M3 (https://huggingface.co/MiniMaxAI/MiniMax-M3), text only.

q and k are normalised per head; a part of each head rotates. The first layers have no experts; the others have
DeepSeek-V3's router without groups, and an ungated shared expert. Every feed-forward has gpt-oss's activation.

In some layers an indexer chooses blocks of keys for each query and KV head. Files converted before llama.cpp supported
the indexer lack it. With these files every query attends to all keys. The result is the same as long as a context has
no more blocks than the model's indexer chooses, so contexts are limited to that length.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.kernels.choice_rule import ChoiceRule
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape, MoeShape
from moeserve.models.indexer import BlockIndexerShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.minimaxm3.hugging_face import MAPPING
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

# The published model's values, for files without an indexer.
CHOSEN_BLOCKS = 16
BLOCK_KEYS = 128


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    The architecture implies the activation; no key states it."""
    reader = ShapeReader(source)
    num_heads, num_kv_heads, head_dim = reader.heads(rotates_whole=False)
    attention = AttentionShape(
        num_heads, num_kv_heads, head_dim, qk_norm="head", rotated=reader.rotated(head_dim)
    )
    has_indexer = [
        n.of_layer(index, n.INDEXER_Q_PROJ) in source.tensors for index in range(reader.num_layers)
    ]
    chooses = replace(attention, indexer=_indexer(reader, attention)) if any(has_indexer) else attention
    mixtures = zip(has_indexer, reader.sigmoid_mixtures(normalize=True), strict=True)
    shape = reader.model(tuple(_layer(chooses if has else attention, ffn) for has, ffn in mixtures))
    if any(has_indexer):
        return shape
    blocks = reader.integer("attention.indexer.top_k", 1, 1 << 16, default=CHOSEN_BLOCKS)
    block_keys = reader.integer("attention.indexer.block_size", 1, 1 << 16, default=BLOCK_KEYS)
    return replace(shape, context_length=min(shape.context_length, blocks * block_keys))


def _indexer(reader: ShapeReader, attention: AttentionShape) -> BlockIndexerShape:
    num_heads = reader.integer("attention.indexer.head_count", 1, 1024)
    if num_heads != attention.num_kv_heads:
        raise reader.error(
            "attention.indexer.head_count",
            f"is {num_heads}; only {attention.num_kv_heads}, as many as KV heads, is supported",
        )
    dim = reader.integer("attention.indexer.key_length", attention.rotary_dim, 1024)
    block_keys = reader.integer("attention.indexer.block_size", 1, 1 << 16)
    blocks = reader.integer("attention.indexer.top_k", 2, 1 << 12)
    local = reader.integer("attention.indexer.local_blocks", 1, blocks - 1)
    rule = ChoiceRule(blocks - local, block_keys, local)
    return BlockIndexerShape(num_heads, dim, rule)


def _layer(attention: AttentionShape, ffn: MoeShape | DenseFfnShape) -> LayerShape:
    if isinstance(ffn, DenseFfnShape):
        return LayerShape(attention, replace(ffn, activation="swiglu_oai"))
    shared = None if ffn.shared is None else replace(ffn.shared, activation="swiglu_oai")
    ffn = replace(ffn, shared=shared, activation="swiglu_oai")
    return LayerShape(attention, ffn)


FAMILY = ModelFamily(architecture="minimax-m3", read_shape=read_shape, hugging_face=MAPPING)
