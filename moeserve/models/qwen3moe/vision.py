"""Qwen3-VL-MoE (https://arxiv.org/abs/2511.21631): Qwen3-MoE with vision, whose pictures also add to the first
layers' outputs."""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.deepstack import deep_layers, with_deepstack
from moeserve.models.interface import ModelFamily, ModelShape
from moeserve.models.qwen3moe.family import FAMILY as QWEN3_MOE
from moeserve.models.sources.huggingface.expert_matrices import transposed_experts
from moeserve.models.sources.huggingface.layer_settings import derived_by
from moeserve.models.sources.source import ModelSource

_MAPPING = QWEN3_MOE.hugging_face
assert _MAPPING is not None
assert _MAPPING.derived is not None


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    return with_deepstack(QWEN3_MOE.read_shape(source), source)


FAMILY = ModelFamily(
    architecture="qwen3vlmoe",
    read_shape=read_shape,
    hugging_face=replace(
        _MAPPING,
        model_type="qwen3_vl_moe_text",
        wrapped_in="qwen3_vl_moe",  # the published form, with vision
        defaults=dict(_MAPPING.defaults) | {"expert_weights_norm": True},
        made=transposed_experts,
        rotates_in_sections=True,
        derived=derived_by(_MAPPING.derived, deep_layers),
    ),
)
