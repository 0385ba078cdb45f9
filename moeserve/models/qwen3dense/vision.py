"""Dense Qwen3-VL (https://arxiv.org/abs/2511.21631): dense Qwen3 with vision, whose pictures also add to the first
layers' outputs."""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.deepstack import deep_layers, with_deepstack
from moeserve.models.interface import ModelFamily, ModelShape
from moeserve.models.qwen3dense.family import FAMILY as QWEN3
from moeserve.models.sources.huggingface.layer_settings import derived_by
from moeserve.models.sources.source import ModelSource

_MAPPING = QWEN3.hugging_face
assert _MAPPING is not None
assert _MAPPING.derived is not None


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    return with_deepstack(QWEN3.read_shape(source), source)


FAMILY = ModelFamily(
    architecture="qwen3vl",
    read_shape=read_shape,
    hugging_face=replace(
        _MAPPING,
        model_type="qwen3_vl_text",
        wrapped_in="qwen3_vl",  # the published form, with vision
        rotates_in_sections=True,
        derived=derived_by(_MAPPING.derived, deep_layers),
    ),
)
