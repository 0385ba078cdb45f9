"""Mistral 4 (https://huggingface.co/mistralai/Mistral-Small-4-119B-2603), text only: DeepSeek's latent attention, a
softmax router, an ungated shared expert.

Past YaRN's original 8,192 positions the model multiplies queries by a factor that grows with the position. moeserve
does not compute that factor, so longer contexts are not served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeserve.models.deepseek2.family import read_shape as read_latent_shape
from moeserve.models.deepseek2.hugging_face import MAPPING
from moeserve.models.errors import SettingError
from moeserve.models.interface import ModelFamily, ModelShape
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface import latent
from moeserve.models.sources.huggingface.layer_settings import integer
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    shape = read_latent_shape(source)
    plain = shape.rope_scaling.original_context_length or shape.context_length
    return replace(shape, context_length=min(shape.context_length, plain))


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns the metadata that follows from config.json, as for DeepSeek's folders, except that a router without
    `scoring_func` uses softmax. Raises ModelError, also if `partial_rotary_factor` contradicts the head's rotated
    part."""
    values = latent.derived(path, {**config, "scoring_func": config.get("scoring_func") or "softmax"})
    rotated = integer(path, config, "qk_rope_head_dim")
    key = rotated + integer(path, config, "qk_nope_head_dim")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = scaling.get("partial_rotary_factor") if isinstance(scaling, dict) else None
    if share is not None and not (isinstance(share, int | float) and int(key * share) == rotated):
        raise SettingError(
            path,
            f"'partial_rotary_factor' is {share!r:.40} and 'qk_rope_head_dim' {rotated} of {key}: they do not agree",
        )
    return values


FOLDER = replace(
    MAPPING,
    model_type="mistral4",
    other_model_types=(),
    wrapped_in="mistral3",
    defaults={**MAPPING.defaults, "expert_weights_norm": True},
    fixed={**MAPPING.fixed, "n_group": (1, 1), "topk_group": (1, 1)},
    derived=derived,
    rope_settings=MAPPING.rope_settings
    | {"llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor"},
    next_token=None,
    skipped_layers=(),
)
FAMILY = ModelFamily("mistral4", read_shape, FOLDER)
