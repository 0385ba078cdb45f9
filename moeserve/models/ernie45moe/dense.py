"""ERNIE 4.5 without experts (https://huggingface.co/baidu/ERNIE-4.5-0.3B-PT), whose attention is as with experts."""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.attention import AttentionShape
from moeserve.models.ernie45moe.family import FAMILY as ERNIE45_MOE
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.huggingface.mapping import DECODER_KEYS, DECODER_LAYER, DENSE_FFN
from moeserve.models.sources.source import ModelSource

_MAPPING = ERNIE45_MOE.hugging_face
assert _MAPPING is not None


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    attention = AttentionShape(
        *reader.heads(), qkv_bias=reader.qkv_bias(), output_bias=reader.output_bias(), in_pairs=True
    )
    return reader.model((LayerShape(attention, DenseFfnShape(reader.dense_width())),) * reader.num_layers)


FAMILY = ModelFamily(
    architecture="ernie4_5",
    read_shape=read_shape,
    hugging_face=replace(
        _MAPPING,
        model_type="ernie4_5",
        keys=DECODER_KEYS | {"feed_forward_length": ("intermediate_size",)},
        layer=DECODER_LAYER | DENSE_FFN,
        moe={},
        dense={},
        experts={},
        optional=frozenset(),
        flattened=frozenset(),
        derived=None,
    ),
)
