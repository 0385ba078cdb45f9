"""Qwen2-VL and Qwen2.5-VL (https://arxiv.org/abs/2502.13923), text only: dense Qwen2 that rotates in three sections.
A text's three positions are equal, so that its sections change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from moeserve.models.interface import ModelFamily, ModelShape
from moeserve.models.qwen2dense.family import FAMILY as QWEN2
from moeserve.models.qwen2dense.family import layers
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.source import ModelSource

THETA: Final = 1e6  # transformers' default
_MAPPING = QWEN2.hugging_face
assert _MAPPING is not None


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    _, _, head_dim = reader.heads()
    return reader.model(
        layers(reader),
        rope_sections=reader.rope_sections(head_dim, in_blocks=True),
        sections_in_blocks=True,
    )


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE, whose type "mrope" of older folders is now the default one with
    sections. Raises ModelError for a missing or unsupported setting."""
    changed = dict(config)
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name)
        if isinstance(given, dict):
            changed[name] = {
                key: "default" if key in ("type", "rope_type") and value == "mrope" else value
                for key, value in given.items()
            }
    return rope_of(path, changed, FOLDER)


FOLDER: Final = replace(
    _MAPPING,
    model_type="qwen2_vl_text",
    other_model_types=("qwen2_5_vl_text",),
    wrapped_in="qwen2_vl",
    other_wrappers=("qwen2_5_vl",),
    rotates_in_sections=True,
    sections_in_blocks=True,
    rope=rope,
    rope_theta=THETA,
)
FAMILY = ModelFamily(architecture="qwen2vl", read_shape=read_shape, hugging_face=FOLDER)
