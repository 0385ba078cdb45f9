"""Folders of OLMo 2 and OLMo 3, with RoPE's settings as they are published, or for each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.layer_settings import (
    FULL,
    SLIDING,
    integer,
    number,
    windows_by_period,
)
from moeserve.models.sources.huggingface.mapping import (
    BEHIND_BLOCKS,
    DECODER_KEYS,
    DENSE_FFN,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.rope_by_kind import check_unscaled, rope_by_kind

PERIOD: Final = 4  # layers, of which the last has no window
THETA: Final = 5e5  # transformers' default


def windowed_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, which layers have a window: none of OLMo 2, from config.json. Raises ModelError for
    a missing or unsupported setting."""
    if config.get("model_type") != "olmo3" or config.get("sliding_window", 1) is None:
        return {}
    window = integer(path, config, "sliding_window", 4096)
    return windows_by_period(path, config, PERIOD) | {n.SLIDING_WINDOW: window}


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE; only layers without a window may have scaled RoPE. Raises
    ModelError."""
    given = config.get("rope_parameters")
    if not isinstance(given, dict) or FULL not in given:
        return rope_of(path, config, MAPPING)
    full, windowed = rope_by_kind(path, config)
    check_unscaled(path, windowed, SLIDING)
    without = {name: value for name, value in config.items() if name != "rope_scaling"}
    values = rope_of(path, {**without, "rope_parameters": full}, MAPPING)
    return values | {"rope.freq_base_swa": number(path, windowed, "rope_theta", 2.0, 1e12, default=THETA)}


MAPPING: Final = HuggingFaceMapping(
    model_type="olmo2",
    other_model_types=("olmo3",),
    keys=DECODER_KEYS | {"feed_forward_length": ("intermediate_size",)},
    # setting: (the only supported value, transformers' default)
    fixed={"hidden_act": ("silu", "silu"), "attention_bias": (False, False), "clip_qkv": (None, None)},
    layer=BEHIND_BLOCKS | DENSE_FFN,
    derived=windowed_layers,
    rope=rope,
    rope_theta=THETA,
)
