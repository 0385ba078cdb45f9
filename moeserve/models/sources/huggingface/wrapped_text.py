"""Extracts the text model from checkpoints of multimodal models, where it is a part with its own names; and other names
that a family gives to what all have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .layer_settings import DEEP_LAYERS
from .safetensors_file import StoredTensor

TEXT_CONFIG = "text_config"
_TEXT = "model.language_model."
_OTHERS = (  # prefixes of vision and sound tensors
    "model.visual.",
    "model.vision_tower.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
)
_OF_ALL = ("quantization_config", "tie_word_embeddings")  # settings that config.json has outside text_config


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json's content as that of the text model."""
    inner = config.get(TEXT_CONFIG)
    if not isinstance(inner, dict):
        return dict(config)
    vision = config.get("vision_config")
    deep = {DEEP_LAYERS: vision[DEEP_LAYERS]} if isinstance(vision, dict) and DEEP_LAYERS in vision else {}
    return inner | deep | {key: config[key] for key in _OF_ALL if key in config}


def text_tensors(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors of the text model, under the names that it has without its wrapper."""
    found = {}
    for name, tensor in stored.items():
        if name.startswith(_TEXT):
            ours = "model." + name.removeprefix(_TEXT)
            found[ours] = replace(tensor, name=ours)
        elif not name.startswith(_OTHERS):
            found[name] = tensor
    return found


def with_prefixes(stored: dict[str, StoredTensor], renamed: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Returns the tensors, those whose names begin with a key of `renamed` under names that begin with its value."""
    found = {}
    for name, tensor in stored.items():
        theirs = next((prefix for prefix in renamed if name.startswith(prefix)), None)
        ours = name if theirs is None else renamed[theirs] + name.removeprefix(theirs)
        found[ours] = replace(tensor, name=ours)
    return found
