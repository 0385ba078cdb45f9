"""Granite with windows (https://huggingface.co/ibm-granite/granite-swash-3b-a600m), with experts and without: Granite 3
with attention sinks in all layers and a window in most; layers may have no positions, or a RoPE base of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moeserve.models.attention import AttentionShape
from moeserve.models.granitemoe.family import attention, feed_forward, scaled_model
from moeserve.models.granitemoe.windowed_folder import LAYER_THETAS, MAPPING
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

ROTATED: Final = "attention.rope_pattern"  # by layer


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    As in llama.cpp, a GGUF must say which layers have a window, and all layers of one that does not name the others
    have positions."""
    reader = ShapeReader(source)
    reader.flags(n.WINDOWED_LAYERS)  # no period stands for them
    given = replace(
        attention(reader), qkv_bias=reader.qkv_bias(), output_bias=reader.output_bias(), has_sinks=True
    )
    ffn = feed_forward(reader)
    mixers = zip(reader.windowed(given), _thetas(reader, source), strict=True)
    return scaled_model(reader, tuple(LayerShape(_rotated(each, theta), ffn) for each, theta in mixers))


def _rotated(given: AttentionShape, theta: float | None) -> AttentionShape:
    return replace(given, has_positions=theta != 0.0, rope_theta=theta or None)


def _thetas(reader: ShapeReader, source: ModelSource) -> list[float | None]:
    """Returns each layer's RoPE base: 0 for no positions, None for the model's."""
    if not reader.has(LAYER_THETAS):
        rotated = reader.optional_flags(ROTATED) or [True] * reader.num_layers
        return [None if each else 0.0 for each in rotated]
    found = source.metadata.require_floats(f"{source.architecture}.{LAYER_THETAS}", reader.num_layers)
    thetas = [float(each) for each in found]
    for theta in thetas:
        if theta != 0.0 and not 2.0 <= theta <= 1e12:
            raise reader.error(LAYER_THETAS, f"has {theta:g}; 0, or 2 to 1e12, is supported")
    model = reader.number("rope.freq_base", 2.0, 1e12)
    return [None if each == model else each for each in thetas]


FAMILY = ModelFamily(architecture="granite_swa", read_shape=read_shape, hugging_face=MAPPING)
