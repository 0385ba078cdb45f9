"""Dense Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): q, k and v have biases; q and k are not normalised.
Also Qwen2.5-Coder, QwQ and the Qwen distillates of DeepSeek-R1."""

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
    DENSE_FFN,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    return reader.model(layers(reader))


def layers(reader: ShapeReader) -> tuple[LayerShape, ...]:
    """Returns the shapes of all layers. Raises ModelError for a missing or unsupported setting."""
    attention = AttentionShape(*reader.heads(), qkv_bias=reader.qkv_bias())
    dense = DenseFfnShape(reader.dense_width())
    return tuple(LayerShape(seen, dense) for seen in reader.windowed(attention))


FAMILY = ModelFamily(
    architecture="qwen2",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="qwen2",
        keys=DECODER_KEYS | {"feed_forward_length": ("intermediate_size",)},
        # setting: (the only supported value, transformers' default)
        fixed={"hidden_act": ("silu", "silu"), "partial_rotary_factor": (1.0, 1.0)},
        layer=DECODER_LAYER | DECODER_BIASES,
        dense=DENSE_FFN,
        metadata={n.HAS_QKV_BIAS: True},
        derived=windows(lambda layer, most: layer >= most),
    ),
)
