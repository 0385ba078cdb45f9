"""Settings of config.json that differ between layers: experts, and sliding windows; by transformers' rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue

FULL, SLIDING = "full_attention", "sliding_attention"
# Kinds of layers in config.json -> their names since transformers 5.
_EARLIER_KINDS = {
    "mamba": "linear_attention",
    "attention": FULL,
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
# Layers of the vision tower whose outputs are added in the text model's first layers (DeepStack): in vision_config.
DEEP_LAYERS = "deepstack_visual_indexes"
_MAX_WINDOW_LAYERS = 28  # transformers' default of max_window_layers

Derived = Callable[[Path, Mapping[str, Any]], dict[str, MetadataValue]]
# (layer index, max_window_layers) -> whether the layer has a window.
WindowRule = Callable[[int, int], bool]


def derived_by(*parts: Derived) -> Derived:
    """Combines several functions into one `derived` of a mapping."""

    def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
        values: dict[str, MetadataValue] = {}
        for part in parts:
            values |= part(path, config)
        return values

    return derived


def sparse_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, which layers have no experts (bool for each layer, from config.json's
    `decoder_sparse_step` and `mlp_only_layers`), and the width of their feed-forward; nothing if all layers have
    experts. Raises ModelError for a missing or unsupported setting."""
    step = integer(path, config, "decoder_sparse_step", 1)
    dense_only = config.get("mlp_only_layers") or []
    if not isinstance(dense_only, list) or not all(isinstance(each, int) for each in dense_only):
        raise SettingError(path, f"'mlp_only_layers' is {dense_only!r}; a list of layers is expected")
    layers = integer(path, config, "num_hidden_layers", None)
    is_dense = [layer in dense_only or (layer + 1) % step != 0 for layer in range(layers)]
    if not any(is_dense):
        return {}
    width = integer(path, config, "intermediate_size", None)
    return {n.DENSE_LAYERS: np.array(is_dense), "feed_forward_length": width}


def leading_dense_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, how many of the first layers have no experts, from config.json's `mlp_layer_types`
    or `first_k_dense_replace`. Raises ModelError for a missing or unsupported setting."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return {"leading_dense_block_count": integer(path, config, "first_k_dense_replace", 1, low=0)}
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if not isinstance(kinds, list) or kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise SettingError(
            path, f"'mlp_layer_types' is {kinds!r}; only dense layers before all sparse ones are supported"
        )
    return {"leading_dense_block_count": dense}


def windows(rule: WindowRule | None) -> Derived:
    """Returns a function that translates `use_sliding_window`, `sliding_window`, `max_window_layers` and `layer_types`
    of config.json to metadata; it raises ModelError if they contradict one another. rule: tells which layers have a
    window if there are no `layer_types`; None: every layer has the window, whatever `layer_types` says."""

    def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
        layers = integer(path, config, "num_hidden_layers", None)
        types = None if rule is None else layer_types(path, config, layers)
        if not config.get("use_sliding_window") or config.get("sliding_window") is None:
            if types is not None and SLIDING in types:
                raise ModelError(
                    path,
                    f"'layer_types' has {SLIDING!r}, but 'use_sliding_window' is not true (or 'sliding_window' is "
                    "missing): set both, or leave 'layer_types' out",
                )
            return {}
        most = integer(path, config, "max_window_layers", _MAX_WINDOW_LAYERS, low=0)
        if types is not None:
            values = windows_of(types)
        else:
            is_windowed = [rule is None or rule(layer, most) for layer in range(layers)]
            values = {n.WINDOWED_LAYERS: np.array(is_windowed)}
        return values | {n.SLIDING_WINDOW: integer(path, config, "sliding_window", None)}

    return derived


def windows_by_period(path: Path, config: Mapping[str, Any], period: int) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's `layer_types`: which layers have a window. period: without the
    setting, all but the last of every `period` layers have one. Raises ModelError for a missing or unsupported
    setting."""
    layers = integer(path, config, "num_hidden_layers")
    types = layer_types(path, config, layers)
    return windows_of(types or [SLIDING if (layer + 1) % period else FULL for layer in range(layers)])


def windows_of(types: Sequence[str]) -> dict[str, MetadataValue]:
    """Returns the key for which layers have a window. types: of each layer."""
    return {n.WINDOWED_LAYERS: np.array([each == SLIDING for each in types])}


def layer_types(
    path: Path, config: Mapping[str, Any], layers: int, kinds: Sequence[str] = (SLIDING, FULL)
) -> list[str] | None:
    """Returns config.json's layer types, each one of `kinds`, by its name since transformers 5 unless `kinds` has the
    earlier one; None if config.json has none. Raises ModelError for a missing or unsupported setting."""
    types = config.get("layer_types")
    if types is None:
        return None
    if isinstance(types, list) and len(types) == layers and all(isinstance(each, str) for each in types):
        renamed = _EARLIER_KINDS.keys() - set(kinds)
        found = [_EARLIER_KINDS[each] if each in renamed else each for each in types]
        if all(each in kinds for each in found):
            return found
    raise SettingError(path, f"'layer_types' is {types!r}; {' or '.join(kinds)} of each layer is expected")


def layer_flags(
    path: Path, config: Mapping[str, Any], layers: int, name: str, values: tuple[Any, Any]
) -> list[bool] | None:
    """Reads a setting with one of two values for each layer. Returns for each layer whether it has the second value;
    None if config.json lacks the setting. Raises ModelError for a missing or unsupported setting."""
    given = config.get(name)
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != layers or any(each not in values for each in given):
        raise SettingError(
            path, f"{name!r} is {given!r:.80}; {values[0]!r} or {values[1]!r} of each layer is expected"
        )
    return [each == values[1] for each in given]


def integer(
    path: Path, config: Mapping[str, Any], name: str, default: int | None = None, low: int = 1
) -> int:
    """Returns an integer setting. default: value of a missing setting; None: the setting is required. Raises
    ModelError."""
    value = default if config.get(name) is None else config[name]
    if value is None:
        raise SettingError(path, f"{name!r} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= 1 << 24:
        raise SettingError(path, f"{name!r} is {value!r}; {low} to {1 << 24} is supported")
    return value


def number(
    path: Path,
    config: Mapping[str, Any],
    name: str,
    low: float,
    high: float,
    *,
    default: float | None = None,
) -> float:
    """Returns a numeric setting. default: value of a missing setting; None: the setting is required. Raises
    ModelError."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise SettingError(path, f"{name!r} is {value!r:.80}; {low:g} to {high:g} is supported")
    return value


def limits(
    path: Path, config: Mapping[str, Any], name: str, layers: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the limit of the activation in each layer, float32 [layers]; 0: no limit, as in all layers without the
    setting. Raises ModelError if the setting is no list of `layers` numbers from 0 to 1e6 or nulls."""
    given = config.get(name) or [0.0] * layers
    if not isinstance(given, list) or len(given) != layers:
        raise SettingError(
            path, f"{name!r} is {given!r:.80}; a number or null for each of {layers} layers is expected"
        )
    return np.array([number(path, {name: each}, name, 0, 1e6, default=0.0) for each in given], np.float32)
