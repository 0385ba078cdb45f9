"""Folders of EXAONE 4, and of the text of EXAONE 4.5."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.layer_settings import (
    integer,
    windows_by_period,
)
from moeserve.models.sources.huggingface.llama3_rope import is_llama3, llama3_rope, rope_factors
from moeserve.models.sources.huggingface.mapping import (
    BEHIND_BLOCKS,
    DECODER_KEYS,
    DENSE_FFN,
    HuggingFaceMapping,
)

PERIOD: Final = 4  # layers, of which the last has no window
THETA: Final = 1e4  # transformers' default


def windowed_layers(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, which layers have a window, from config.json. Raises ModelError, also for a pattern
    in letters without `layer_types`."""
    if config.get("sliding_window", 1) is None:
        return {}
    pattern = config.get("sliding_window_pattern")
    if config.get("layer_types") is None and isinstance(pattern, str):
        raise SettingError(path, f"{'layer_types'!r} is missing")
    period = PERIOD if isinstance(pattern, str) else integer(path, config, "sliding_window_pattern", PERIOD)
    window = integer(path, config, "sliding_window", 4096)
    return windows_by_period(path, config, period) | {n.SLIDING_WINDOW: window}


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, RoPE's settings, including Llama 3's type. Raises ModelError for a missing or
    unsupported setting."""
    return llama3_rope(path, config, THETA) if is_llama3(config) else rope_of(path, config, MAPPING)


MAPPING: Final = HuggingFaceMapping(
    model_type="exaone4",
    other_model_types=("exaone4_5_text",),  # in the first EXAONE 4.5
    wrapped_in="exaone4_5",
    skipped=("mtp.",),
    keys=DECODER_KEYS | {"feed_forward_length": ("intermediate_size",)},
    fixed={"hidden_act": ("silu", "silu")},  # setting: (the only supported value, transformers' default)
    layer=BEHIND_BLOCKS | DENSE_FFN,
    derived=windowed_layers,
    rope=rope,
    rope_theta=THETA,
    made_of_none=rope_factors,
)
