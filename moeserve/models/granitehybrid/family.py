"""Granite 4 (https://huggingface.co/ibm-granite/granite-4.0-h-small): Mamba-2 in nine of ten layers, attention without
positions in the tenth; in the micro models attention with positions in all layers (in GGUF files these are Granite 3's
architecture). All layers have routed experts and a shared expert, or a dense feed-forward.

The four scales, and the division of the residual stream by the scale of block outputs, are as in Granite 3
(granitemoe/family.py). Mamba-2's own norm does not read the residual stream, so its epsilon is unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape, MoeShape, SharedExpert
from moeserve.models.granitehybrid.hugging_face import MAPPING, ROTATES
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.recurrent_heads import mamba2_shape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.source import ModelSource

KV_HEADS = "attention.head_count_kv"


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    Layers without KV heads are Mamba-2. A scale of 0 means no scale, as in llama.cpp."""
    reader = ShapeReader(source)
    rotates = reader.flag(ROTATES, default=False)
    kv_heads = reader.layer_integers(KV_HEADS, 0, 1024)
    if rotates and not all(kv_heads):
        raise reader.error(
            ROTATES, "is true (Bamba); only attention without positions is supported beside Mamba-2"
        )
    if not any(kv_heads):
        raise reader.error(KV_HEADS, "has no layer that attends, which is not supported")
    mamba2 = None if all(kv_heads) else mamba2_shape(reader, source)
    ffn = _feed_forward(reader)
    added = reader.number("residual_scale", 0.0, 1e3, default=0.0) or 1.0
    shape = reader.model(
        tuple(
            LayerShape(_attention(reader, num_kv, rotates) if num_kv else mamba2, ffn) for num_kv in kv_heads
        ),
        embedding_scale=(reader.number("embedding_scale", 0.0, 1e6, default=0.0) or 1.0) / added,
        logit_scale=1.0 / (reader.number("logit_scale", 0.0, 1e6, default=0.0) or 1.0),
        rope_theta=10000.0,
    )
    return replace(shape, rms_eps=shape.rms_eps / added**2)


def _attention(reader: ShapeReader, num_kv_heads: int, rotates: bool) -> AttentionShape:
    scale = reader.number("attention.scale", 0.0, 1e3, default=0.0) or None
    heads = reader.heads(rotates_whole=False, num_kv_heads=num_kv_heads)
    return AttentionShape(*heads, scale=scale, has_positions=rotates)


def _feed_forward(reader: ShapeReader) -> MoeShape | DenseFfnShape:
    shared = reader.integer("expert_shared_feed_forward_length", 0, 1 << 16, default=0)
    if not reader.integer("expert_count", 0, 4096, default=0):
        return DenseFfnShape(reader.dense_width())  # also of a file that states a shared expert's width
    return MoeShape(
        *reader.experts("feed_forward_length"),
        RouterOptions(scoring="softmax"),
        shared=SharedExpert(shared, is_gated=False) if shared else None,
    )


FAMILY = ModelFamily(architecture="granitehybrid", read_shape=read_shape, hugging_face=MAPPING)
