"""Trinity, AFMoE (https://huggingface.co/arcee-ai/Trinity-Mini).

Three of four layers have a sliding window; the fourth has full attention without positions. A gate multiplies
attention's output. Norms come before and after each block. DeepSeek-V3's router, with an ungated shared expert.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.interface import AttentionShape, LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.source import ModelSource

PERIOD = 4  # layers; if no key says otherwise, the last of them has full attention


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError. The architecture implies two facts that no key states:
    embeddings are multiplied by sqrt(hidden), and layers without a window have no positions."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), qk_norm="head", gate="element")
    seen = reader.windowed(attention, PERIOD)
    placed = [each if each.window else replace(each, has_positions=False) for each in seen]
    mixtures = reader.sigmoid_mixtures(normalize=True)
    layers = [LayerShape(each, ffn, is_sandwiched=True) for each, ffn in zip(placed, mixtures, strict=True)]
    return reader.model(tuple(layers), embedding_scale=reader.hidden_size**0.5)


FAMILY = ModelFamily(architecture="afmoe", read_shape=read_shape)
