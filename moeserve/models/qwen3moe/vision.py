"""Qwen3-VL-MoE (https://arxiv.org/abs/2511.21631): Qwen3-MoE with vision. Rotary positions have sections for
pictures; a text's positions are equal in all sections, which is ordinary RoPE. Pictures also add to the first
layers' outputs (DeepStack, https://arxiv.org/abs/2406.04334)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelFamily, ModelShape
from moeserve.models.qwen3moe.family import FAMILY as QWEN3_MOE
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.expert_matrices import transposed_experts
from moeserve.models.sources.huggingface.layer_settings import DEEP_LAYERS, derived_by
from moeserve.models.sources.source import ModelSource

_MAPPING = QWEN3_MOE.hugging_face
assert _MAPPING is not None
assert _MAPPING.derived is not None


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError."""
    shape, reader = QWEN3_MOE.read_shape(source), ShapeReader(source)
    heads = shape.heads
    assert isinstance(heads, AttentionShape)
    deep = reader.integer(n.DEEP_LAYERS, 0, shape.num_layers, default=0)
    return replace(shape, rope_sections=reader.rope_sections(heads.rotary_dim), deep_layers=deep)


def _deep_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns the number of layers to whose output pictures are added: one per DeepStack layer of the vision tower."""
    asked = config.get(DEEP_LAYERS, [])
    if not isinstance(asked, list):
        raise ModelError(path, f"{DEEP_LAYERS!r} is {asked!r}; a list is expected")
    return {n.DEEP_LAYERS: len(asked)}


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
        derived=derived_by(_MAPPING.derived, _deep_layers),
    ),
)
