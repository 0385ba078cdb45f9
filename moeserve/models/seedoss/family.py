"""Seed-OSS (https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct): no experts; q, k and v have biases."""

from __future__ import annotations

from typing import Final

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    HuggingFaceMapping,
    renamed,
)
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), qkv_bias=reader.qkv_bias())
    layer = LayerShape(attention, DenseFfnShape(reader.dense_width()), ffn_norm=n.POST_ATTENTION_NORM)
    return reader.model((layer,) * reader.num_layers)


MAPPING: Final = HuggingFaceMapping(
    model_type="seed_oss",
    keys=DECODER_KEYS | {"feed_forward_length": ("intermediate_size",), n.HAS_QKV_BIAS: ("attention_bias",)},
    defaults={n.HAS_QKV_BIAS: True},
    # setting: (the only supported value, transformers' default)
    fixed={"hidden_act": ("silu", "silu"), "attention_out_bias": (False, False), "mlp_bias": (False, False)},
    layer=renamed(DECODER_LAYER, {n.FFN_NORM: n.POST_ATTENTION_NORM}) | DECODER_BIASES,
    dense=DENSE_FFN,
    optional=frozenset(DECODER_BIASES),
)
FAMILY = ModelFamily(architecture="seed_oss", read_shape=read_shape, hugging_face=MAPPING)
