"""Folders of Gemma 3: the published ones, with vision, which is left out, or without, and transformers' own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import (
    FULL,
    SLIDING,
    integer,
    number,
    windows_by_period,
)
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    HEAD_DIM,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.rope_by_kind import check_unscaled, rope_by_kind

PERIOD: Final = 6  # layers, of which the last has no window
WINDOW_THETA: Final = 1e4  # RoPE's base in layers with a window


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, which layers have a window, and the scale of scores, from config.json. Raises
    ModelError."""
    period = integer(path, config, "sliding_window_pattern", PERIOD)
    return windows_by_period(path, config, period) | {
        "attention.scale": number(path, config, "query_pre_attn_scalar", 1e-3, 1e6, default=256.0) ** -0.5,
    }


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE, of the published form and of that which has an object for each
    kind of layer. Raises ModelError for a missing or unsupported setting."""
    given = config.get("rope_parameters")
    if isinstance(given, dict) and FULL in given:
        full, window = rope_by_kind(path, config)
        check_unscaled(path, window, SLIDING)
    else:
        full = dict(config.get("rope_scaling") or {}) | {"rope_theta": config.get("rope_theta")}
        window = {"rope_theta": config.get("rope_local_base_freq")}
    kind = full.get("rope_type", full.get("type", "default"))
    if kind not in ("default", "linear"):
        raise SettingError(
            path, f"rope_type of {FULL} is {kind!r:.40}; only 'default' and 'linear' are supported"
        )
    values: dict[str, MetadataValue] = {
        "rope.freq_base": number(path, full, "rope_theta", 2.0, 1e12, default=1e6),
        "rope.freq_base_swa": number(path, window, "rope_theta", 2.0, 1e12, default=WINDOW_THETA),
    }
    if kind == "linear":
        values |= {
            "rope.scaling.type": kind,
            "rope.scaling.factor": number(path, full, "factor", 1.0, 1024.0),
        }
    return values


# What published files leave out, by GGUF's key: transformers' defaults.
_DEFAULTS: Final[Mapping[str, int | float]] = {
    "attention.head_count": 8,
    "attention.head_count_kv": 4,
    HEAD_DIM: 256,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "context_length": 131_072,
    "vocab_size": 262_208,
    n.SLIDING_WINDOW: 4096,
}
_NORMS: Final = {
    n.of_part(n.ATTN_NORM): "input_layernorm.weight",
    n.of_part(n.POST_ATTENTION_NORM): "post_attention_layernorm.weight",
    n.of_part(n.FFN_NORM): "pre_feedforward_layernorm.weight",
    n.of_part(n.POST_FFW_NORM): "post_feedforward_layernorm.weight",
} | DECODER_QK_NORMS

MAPPING: Final = HuggingFaceMapping(
    model_type="gemma3_text",
    wrapped_in="gemma3",
    keys=DECODER_KEYS
    | {
        "feed_forward_length": ("intermediate_size",),
        n.SLIDING_WINDOW: ("sliding_window",),
    },
    defaults=_DEFAULTS,
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh", "gelu_pytorch_tanh"),
        **dict.fromkeys(("attention_bias", "use_bidirectional_attention"), (False, False)),
        **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), (None, None)),
    },
    layer=DECODER_LAYER | DENSE_FFN | _NORMS,
    less_one=frozenset(_NORMS) | {n.OUTPUT_NORM},
    derived=derived,
    rope=rope,
    tied_by_default=True,
)
