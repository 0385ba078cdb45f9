"""EXAONE 4.0 (https://arxiv.org/abs/2507.11407): blocks read the residual without a norm, and norms come after them; q
and k are normalised by head. In the large model three of four layers have a window, and the others no positions; in the
small one no layer has a window, and all have positions."""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.attention import AttentionShape
from moeserve.models.exaone4.hugging_face import MAPPING, PERIOD
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    As in transformers, a file with a window is treated as the large model; llama.cpp decides by the number of
    layers."""
    reader = ShapeReader(source)
    attention = AttentionShape(
        *reader.heads(), qk_norm="head", has_rope_factors=n.ROPE_FREQS in source.tensors
    )
    mixers = [attention] * reader.num_layers
    if reader.has(n.SLIDING_WINDOW):
        seen = reader.windowed(attention, PERIOD)
        mixers = [each if each.window else replace(each, has_positions=False) for each in seen]
    dense = DenseFfnShape(reader.dense_width())
    layers = (LayerShape(each, dense, is_sandwiched=True, has_input_norms=False) for each in mixers)
    return reader.model(tuple(layers))


FAMILY = ModelFamily("exaone4", read_shape, MAPPING)
