"""Translates config.json to GGUF's metadata keys. Ranges are checked when the keys are read
(`models/shape_reader.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue

from .mapping import DEFAULTED, HuggingFaceMapping

_ROPE_KEYS = {  # settings of each rope_type, in addition to the ones of all types
    "default": set[str](),
    "yarn": {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"},
    "linear": set[str](),
}
_ROPE_COMMON = {"rope_type", "type", "rope_theta", "factor"}

_ROTATED = "rope.dimension_count"
_LARGEST: Final = 1e30
_MOST_HEAD_DIM: Final = 1 << 20
_SECTIONS: Final = "rope.dimension_sections"
_ROPE_SPELLING = {
    _ROTATED: "partial_rotary_factor",
    _SECTIONS: "mrope_section",
    n.YARN_TRUNCATE: "truncate",
    "rope.freq_base": "rope_theta",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
}


def spelling(architecture: str, mapping: HuggingFaceMapping) -> dict[str, str]:
    """Returns the names in config.json of the metadata's keys, for messages to users."""
    spellings = {ours: names[0] for ours, names in mapping.keys.items()} | _ROPE_SPELLING
    return {f"{architecture}.{ours}": theirs for ours, theirs in spellings.items()}


def metadata_of(
    path: Path, config: Mapping[str, Any], architecture: str, mapping: HuggingFaceMapping
) -> dict[str, MetadataValue]:
    """Returns config.json's settings under GGUF's keys. Raises ModelError for a missing or unsupported setting."""
    values: dict[str, MetadataValue] = {"general.architecture": architecture}
    for ours, names in mapping.keys.items():
        value = _agreed(path, ours, {name: config[name] for name in names if config.get(name) is not None})
        value = mapping.defaults.get(ours) if value is None else value
        if value is not None:
            values[f"{architecture}.{ours}"] = value
        elif ours not in DEFAULTED:
            raise SettingError(path, f"{names[0]!r} is missing")
    rope = rope_of(path, config, mapping) if mapping.rope is None else mapping.rope(path, config)
    more = rope | _skipped_layers(config, mapping)
    more |= mapping.metadata
    if mapping.derived is not None:
        more |= mapping.derived(path, config)
    return values | {f"{architecture}.{key}": value for key, value in more.items()}


def _agreed(path: Path, ours: str, given: Mapping[str, Any]) -> Any:
    """Returns the value that config.json has under several names; None without one. Raises ModelError if the values
    differ, because versions of transformers disagree on which name counts. Lengths of contexts may differ."""
    (name, value), *others = given.items() or [("", None)]
    for other, another in others:
        if another != value and ours != "context_length":
            raise _disagree(path, name, value, other, another)
    return value


def _disagree(path: Path, name: str, value: Any, other: str, another: Any) -> ModelError:
    text = (
        f"{name!r} is {value!r:.80} and {other!r} {another!r:.80}: they do not agree; leave the wrong one out"
    )
    return ModelError(path, text)


def _skipped_layers(config: Mapping[str, Any], mapping: HuggingFaceMapping) -> dict[str, MetadataValue]:
    """Returns the number of next-token layers, which a GGUF counts among its blocks."""
    layers = config.get("num_hidden_layers")
    count = next((config[name] for name in mapping.skipped_layers if config.get(name) is not None), 0)
    if not count or not isinstance(count, int) or not isinstance(layers, int):
        return {}
    return {"block_count": layers + count, n.NEXTN_LAYERS: count}


def _rotated(path: Path, config: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns the share of a head that rotates, from transformers' new and old settings."""
    name, stated = "partial_rotary_factor", config.get("rotary_dim")
    factor = scaling.get(name, config.get(name))
    if stated is not None and factor is None:
        return {_ROTATED: stated}
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("head_dim") is None and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        head_dim: Any = width // heads
    else:
        head_dim = config.get("head_dim")
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise SettingError(path, f"{name!r} is {factor!r}; a number up to 1 is expected")
    if not isinstance(head_dim, int) or not 0 < head_dim <= _MOST_HEAD_DIM:
        raise SettingError(path, f"'head_dim' is {head_dim!r}; a number up to {_MOST_HEAD_DIM} is expected")
    rotated = int(head_dim * factor)
    if stated is not None and stated != rotated:
        raise ModelError(
            path,
            f"'rotary_dim' is {stated!r} and {name!r} {factor!r} of {head_dim}: they do not agree; leave the wrong one "
            "out",
        )
    return {_ROTATED: rotated}


def _rope_settings(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the RoPE settings, of which transformers has two objects; if both exist they must agree, because
    versions differ in which they use."""
    given = {name: config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name)}
    for name, value in given.items():
        if not isinstance(value, dict):
            raise SettingError(path, f"{name} is {value!r}, an object is expected")
    if len(given) == 2 and not _agree(config, *given.values()):
        raise ModelError(
            path,
            f"'rope_scaling' is {given['rope_scaling']!r} and 'rope_parameters' {given['rope_parameters']!r}: they do "
            "not agree; leave the wrong one out",
        )
    return next(iter(given.values()), {})


def _agree(config: Mapping[str, Any], *both: Mapping[str, Any]) -> bool:
    """Returns whether the two objects agree, with older names and top-level settings taken into account."""
    outside = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    one, other = (
        outside
        | {"rope_type": each.get("type", "default")}
        | {k: v for k, v in each.items() if v is not None}
        for each in both
    )
    return {**one, "type": None} == {**other, "type": None}


def rope_of(path: Path, config: Mapping[str, Any], mapping: HuggingFaceMapping) -> dict[str, MetadataValue]:
    """Returns RoPE's settings from `rope_parameters` (transformers 5), or from rope_theta and `rope_scaling`
    (before)."""
    scaling = _rope_settings(path, config)
    theta = scaling.get("rope_theta", config.get("rope_theta")) or mapping.rope_theta
    if theta is None:
        raise SettingError(path, "'rope_theta' is missing")
    values: dict[str, MetadataValue] = {"rope.freq_base": theta}
    if mapping.rotates_part:
        values |= _rotated(path, config, scaling)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise SettingError(
            path, f"rope_type {kind!r} is not supported; supported are {', '.join(_ROPE_KEYS)}"
        )
    given = {key for key, value in scaling.items() if value is not None}
    unknown = given - _ROPE_COMMON - _ROPE_KEYS[kind]
    if mapping.rotates_part:
        unknown -= {"partial_rotary_factor"}
    if kind == "yarn":
        unknown -= mapping.rope_settings
    if mapping.rotates_in_sections:
        unknown -= {"mrope_section", "mrope_interleaved"}
        values |= _sections(path, scaling, interleaved=not mapping.sections_in_blocks)
    if unknown:
        raise SettingError(path, f"{sorted(unknown)[0]!r} of rope_type {kind!r} is not supported")
    return values if kind == "default" else values | _scaling(path, kind, scaling)


def _sections(path: Path, scaling: Mapping[str, Any], *, interleaved: bool) -> dict[str, MetadataValue]:
    """Returns the sections of multi-section RoPE, whose order is the family's."""
    sections = scaling.get("mrope_section")
    if sections is None:
        return {}
    if not isinstance(sections, list) or [type(section) for section in sections] != [int] * 3:
        raise SettingError(path, f"'mrope_section' is {sections!r}; three numbers are expected")
    if scaling.get("mrope_interleaved", interleaved) is not interleaved:
        raise SettingError(
            path, f"'mrope_interleaved' is not {str(interleaved).lower()}; no other order is supported"
        )
    return {_SECTIONS: np.array([*sections, 0], np.int32)}


def _scaling(path: Path, kind: str, scaling: Mapping[str, Any]) -> dict[str, MetadataValue]:
    factor, attention = scaling.get("factor"), scaling.get("attention_factor")
    if not isinstance(factor, int | float) or not factor >= 1:
        raise SettingError(path, f"'factor' of rope_type {kind!r} is {factor!r}; 1 or more is expected")
    values: dict[str, MetadataValue] = {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    if kind == "yarn":
        values[n.YARN_TRUNCATE] = scaling.get("truncate", True)
    for ours, theirs in (
        ("rope.scaling.original_context_length", "original_max_position_embeddings"),
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ):
        if scaling.get(theirs) is not None:
            values[ours] = scaling[theirs]
    if attention is not None:
        if not isinstance(attention, int | float) or not abs(attention) < _LARGEST:
            raise SettingError(path, f"'attention_factor' is {str(attention)[:40]}, a number is expected")
        values["rope.scaling.yarn_attn_factor"] = attention
    return values
