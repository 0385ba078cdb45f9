"""Mistral 4 (https://huggingface.co/mistralai/Mistral-Small-4-119B-2603), text only: DeepSeek's latent attention, a
softmax router, an ungated shared expert.

Past YaRN's original 8,192 positions the model multiplies queries by a factor that grows with the position. The
blocks do not compute that factor, so longer contexts are not served.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.deepseek2.family import read_shape as read_latent_shape
from moeserve.models.interface import ModelFamily, ModelShape
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError."""
    shape = read_latent_shape(source)
    plain = shape.rope_scaling.original_context_length or shape.context_length
    return replace(shape, context_length=min(shape.context_length, plain))


FAMILY = ModelFamily("mistral4", read_shape)
