"""Trinity, AFMoE (https://huggingface.co/arcee-ai/Trinity-Mini): three of four layers see a window, the fourth all,
without positions; attention's output is multiplied by a gate; norms before and behind each block; DeepSeek-V3's router
beside an ungated shared expert."""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.interface import AttentionShape, LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.source import ModelSource

PERIOD = 4  # layers, of which the last sees all, where no key says so


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError. No key says that embeddings are multiplied by
    sqrt(hidden), or that layers without a window have no positions."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), qk_norm="head", gate="element")
    seen = reader.windowed(attention, PERIOD)
    placed = [each if each.window else replace(each, has_positions=False) for each in seen]
    mixtures = reader.sigmoid_mixtures(normalize=True)
    layers = [LayerShape(each, ffn, is_sandwiched=True) for each, ffn in zip(placed, mixtures, strict=True)]
    return reader.model(tuple(layers), embedding_scale=reader.hidden_size**0.5)


FAMILY = ModelFamily(architecture="afmoe", read_shape=read_shape)
