"""Qwen3-VL-MoE (https://arxiv.org/abs/2511.21631), text alone: as Qwen3-MoE. Rotary positions come in sections for
images; a text's are equal in all sections, which is plain rotation. Pictures, which would add to the first layers'
outputs (DeepStack), are not read."""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.interface import ModelFamily
from moeserve.models.qwen3moe.family import FAMILY as QWEN3_MOE
from moeserve.models.sources.huggingface.expert_matrices import transposed_experts

_MAPPING = QWEN3_MOE.hugging_face
assert _MAPPING is not None

FAMILY = ModelFamily(
    architecture="qwen3vlmoe",
    read_shape=QWEN3_MOE.read_shape,
    hugging_face=replace(
        _MAPPING,
        model_type="qwen3_vl_moe_text",
        wrapped_in="qwen3_vl_moe",  # as it is published, with vision
        defaults=dict(_MAPPING.defaults) | {"expert_weights_norm": True},
        made=transposed_experts,
        rotates_in_sections=True,
    ),
)
