"""Dense Qwen3 (Qwen3 technical report, https://arxiv.org/abs/2505.09388): Qwen3-MoE with one feed-forward per layer
instead of experts."""

from __future__ import annotations

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.layer_settings import windows
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    OUTPUT_BIAS,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    attention = AttentionShape(
        *reader.heads(), qk_norm="head", qkv_bias=reader.qkv_bias(), output_bias=reader.output_bias()
    )
    dense = DenseFfnShape(reader.dense_width())
    return reader.model(tuple(LayerShape(seen, dense) for seen in reader.windowed(attention)))


FAMILY = ModelFamily(
    architecture="qwen3",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="qwen3",
        keys=DECODER_KEYS
        | {"feed_forward_length": ("intermediate_size",), n.HAS_QKV_BIAS: ("attention_bias",)},
        defaults={n.HAS_QKV_BIAS: False},
        # setting: (the only supported value, transformers' default)
        fixed={
            "hidden_act": ("silu", "silu"),
            "partial_rotary_factor": (1.0, 1.0),
        },
        layer=DECODER_LAYER | DECODER_QK_NORMS | DECODER_BIASES | OUTPUT_BIAS,
        dense=DENSE_FFN,
        optional=frozenset(DECODER_BIASES | OUTPUT_BIAS),
        derived=windows(lambda layer, most: layer >= most),
    ),
)
