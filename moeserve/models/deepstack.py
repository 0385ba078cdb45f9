"""Settings of text models whose pictures add to the first layers' outputs (DeepStack,
https://arxiv.org/abs/2406.04334), and whose rotary positions have sections. A text's positions are equal in all
sections, which is ordinary RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import SettingError
from moeserve.models.interface import ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import DEEP_LAYERS
from moeserve.models.sources.source import ModelSource


def with_deepstack(shape: ModelShape, source: ModelSource) -> ModelShape:
    """Returns a text model's shape with the sections and the number of layers that pictures add to. Raises
    ModelError."""
    reader, heads = ShapeReader(source), shape.heads
    assert isinstance(heads, AttentionShape)
    deep = reader.integer(n.DEEP_LAYERS, 0, shape.num_layers, default=0)
    return replace(shape, rope_sections=reader.rope_sections(heads.rotary_dim), deep_layers=deep)


def deep_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns the number of layers to whose output pictures are added: one per DeepStack layer of the vision tower.
    Raises ModelError."""
    asked = config.get(DEEP_LAYERS, [])
    if not isinstance(asked, list):
        raise SettingError(path, f"{DEEP_LAYERS!r} is {asked!r}; a list is expected")
    return {n.DEEP_LAYERS: len(asked)}
