"""Extracts the text model from checkpoints of multimodal models, in which it is a part with its own names. Also
translates a family's own names of common tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .layer_settings import DEEP_LAYERS
from .safetensors_file import StoredTensor

TEXT_CONFIG = "text_config"
# Prefixes of the text's tensors -> without the wrapper. Other names stay unchanged.
_TEXT = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHERS = (  # prefixes of vision and sound tensors, and of the projections between them and the text
    "model.visual.",
    "visual.",
    "model.vision_tower.",
    "model.vision_model.",
    "model.embed_vision.",
    "model.vision_embedder.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.multi_modal_projector.",
    "vision_model.",
    "vision_tower.",
    "model.vision_adapter.",
    "model.vision_projection.",
    "multi_modal_projector.",
    "mm_projector.",
    "patch_merge_mlp.",
    "vit_large_projector.",
)
_OF_ALL = (
    "quantization_config",
    "quantization",
    "tie_word_embeddings",
    "eos_token_id",
)  # settings that config.json has outside text_config


def inner_model_type(config: Mapping[str, Any]) -> str | None:
    """Returns the text model's `model_type` in a multimodal model's config.json; None without one."""
    inner = config.get(TEXT_CONFIG)
    model_type = inner.get("model_type") if isinstance(inner, dict) else None
    return model_type if isinstance(model_type, str) else None


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of config.json that describes the text model."""
    inner = config.get(TEXT_CONFIG)
    if not isinstance(inner, dict):
        return dict(config)
    vision = config.get("vision_config")
    deep = {DEEP_LAYERS: vision[DEEP_LAYERS]} if isinstance(vision, dict) and DEEP_LAYERS in vision else {}
    return inner | deep | {key: config[key] for key in _OF_ALL if config.get(key) is not None}


def text_tensors(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors of the text model, under the names that it has without its wrapper."""
    return with_prefixes(
        {name: tensor for name, tensor in stored.items() if not name.startswith(_OTHERS)}, _TEXT
    )


def with_prefixes(stored: dict[str, StoredTensor], renamed: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Returns the tensors; a name that begins with a key of `renamed` begins with the key's value instead."""
    found = {}
    for name, tensor in stored.items():
        theirs = next((prefix for prefix in renamed if name.startswith(prefix)), None)
        ours = name if theirs is None else renamed[theirs] + name.removeprefix(theirs)
        found[ours] = replace(tensor, name=ours)
    return found
