"""Llama-Nemotron Super 49B and Ultra 253B (https://arxiv.org/abs/2505.00949): Llama 3, with blocks changed or left out
layer by layer (https://arxiv.org/abs/2411.19146). A layer may lack attention, the feed-forward, or both, and layers
differ in KV heads and in the width of the feed-forward.

Layers whose attention or feed-forward is one matrix (51B's) are refused.
"""

from __future__ import annotations

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.nemotronnas.hugging_face import HEADS, KV_HEADS, MAPPING, THETA, WIDTHS
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    A layer without heads does not attend, and one of width 0 has no feed-forward."""
    reader = ShapeReader(source)
    heads = reader.layer_integers(HEADS, 0, 1024)
    kv_heads = reader.layer_integers(KV_HEADS, 0, 1024)
    widths = reader.layer_integers(WIDTHS, 0, 1 << 20)
    if not any(kv_heads):
        raise reader.error(KV_HEADS, "has no attention layer, which is not supported")
    head_dim = reader.integer("attention.key_length", 2, 1024, default=reader.hidden_size // max(heads))
    for suffix in ("attention.value_length", "rope.dimension_count"):
        reader.only(suffix, head_dim)
    in_pairs = not reader.flag(n.ROPE_HALVES, default=False)
    layers = []
    for num, num_kv, width in zip(heads, kv_heads, widths, strict=True):
        if num and not num_kv:
            raise reader.error(KV_HEADS, f"is 0 beside {num} heads: attention of one matrix is not supported")
        if num_kv and (not num or num % num_kv):
            raise reader.error(KV_HEADS, f"has {num_kv}; it must divide the {num} heads")
        attention = AttentionShape(
            num, num_kv, head_dim, has_rope_factors=n.ROPE_FREQS in source.tensors, in_pairs=in_pairs
        )
        layers.append(LayerShape(attention if num else None, DenseFfnShape(width) if width else None))
    return reader.model(tuple(layers), rope_theta=THETA)


FAMILY = ModelFamily(architecture="deci", read_shape=read_shape, hugging_face=MAPPING)
