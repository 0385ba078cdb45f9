"""GLM-5 (https://huggingface.co/zai-org/GLM-5): DeepSeek's latent attention, limited to keys that an indexer
chooses (https://arxiv.org/abs/2512.02556).

Here every query attends to all keys. That is the same as long as there are no more keys than the indexer chooses.
So contexts are limited to that length, and the indexer's weights are not read.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.deepseek2.family import read_shape as read_latent_shape
from moeserve.models.interface import ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError."""
    shape = read_latent_shape(source)
    chosen = ShapeReader(source).integer("attention.indexer.top_k", 1, 1 << 24)
    layers = tuple(replace(layer, unread=n.INDEXER) for layer in shape.layers)
    return replace(shape, layers=layers, context_length=min(shape.context_length, chosen))


FAMILY = ModelFamily("glm-dsa", read_shape, has_next_token_block=True)
