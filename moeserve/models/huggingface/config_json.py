"""config.json of a Qwen3-MoE under GGUF's metadata keys.

What the model's code in transformers (`Qwen3MoeConfig`) knows and ours does not is refused: a setting that is passed
over would quietly change every answer. Ranges are checked where the keys are read (`qwen3moe.config`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.models.errors import ModelError
from moeserve.models.gguf.metadata import MetadataValue

from .json_files import read_json

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "qwen3moe"  # the same in a GGUF

# GGUF's key without the architecture: config.json's, and the name that transformers 5 writes.
_KEYS = {
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
}
_HEAD_DIM = "attention.key_length"  # may be missing: hidden_size / num_attention_heads, as in a GGUF

# Settings with the one value that is supported, and transformers' own where the file has none.
_FIXED: dict[str, tuple[Any, Any]] = {
    "hidden_act": ("silu", "silu"),
    "norm_topk_prob": (True, False),
    "decoder_sparse_step": (1, 1),
    "mlp_only_layers": ([], []),
    "attention_bias": (False, False),
    "use_sliding_window": (False, False),
    "partial_rotary_factor": (1.0, 1.0),
}
_ROPE_KEYS = {  # of each rope_type, beside those that all have
    "default": set[str](),
    "yarn": {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"},
    "linear": set[str](),
}
_ROPE_COMMON = {"rope_type", "type", "rope_theta", "factor"}

_ROPE_SPELLING = {
    "rope.freq_base": "rope_theta",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
}
# What a user finds in config.json for a key of the metadata.
SPELLING = {
    f"{ARCHITECTURE}.{ours}": theirs
    for ours, theirs in ({ours: names[0] for ours, names in _KEYS.items()} | _ROPE_SPELLING).items()
}


def read_config(folder: Path) -> tuple[dict[str, Any], dict[str, MetadataValue]]:
    """config.json as it is, and its metadata under GGUF's keys. Raises ModelError."""
    path = folder / "config.json"
    config = read_json(path)
    check_supported(path, config)
    values: dict[str, MetadataValue] = {"general.architecture": ARCHITECTURE}
    for ours, names in _KEYS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None:
            values[f"{ARCHITECTURE}.{ours}"] = value
        elif ours != _HEAD_DIM:
            raise ModelError(path, f"{names[0]!r} is missing")
    values |= {f"{ARCHITECTURE}.{key}": value for key, value in _rope(path, config).items()}
    return config, values


def check_supported(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for another architecture, a quantised checkpoint, or a variant that we would get wrong."""
    model_type = config.get("model_type")
    if model_type != MODEL_TYPE:
        raise ModelError(path, f"model_type {model_type!r} is not supported; supported is {MODEL_TYPE!r}")
    if config.get("quantization_config") is not None:
        raise ModelError(
            path,
            "has a quantization_config; of such models only GGUF files are supported, and checkpoints in bfloat16, "
            "float16 or float32",
        )
    for key, (supported, default) in _FIXED.items():
        value = default if config.get(key) is None else config[key]
        if value != supported:
            raise ModelError(path, f"{key!r} is {value!r}; only {supported!r} is supported")


def _rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """RoPE's settings: in `rope_parameters` (transformers 5), or rope_theta and `rope_scaling` (before)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(path, f"rope_parameters is {scaling!r}, an object is expected")
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ModelError(path, "'rope_theta' is missing")
    values: dict[str, MetadataValue] = {"rope.freq_base": theta}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ModelError(path, f"rope_type {kind!r} is not supported; supported are {', '.join(_ROPE_KEYS)}")
    given = {key for key, value in scaling.items() if value is not None}
    unknown = given - _ROPE_COMMON - _ROPE_KEYS[kind]
    if unknown:
        raise ModelError(path, f"{sorted(unknown)[0]!r} of rope_type {kind!r} is not supported")
    return values if kind == "default" else values | _scaling(path, kind, scaling)


def _scaling(path: Path, kind: str, scaling: Mapping[str, Any]) -> dict[str, MetadataValue]:
    factor, attention = scaling.get("factor"), scaling.get("attention_factor")
    if not isinstance(factor, int | float) or not factor >= 1:
        raise ModelError(path, f"'factor' of rope_type {kind!r} is {factor!r}; 1 or more is expected")
    values: dict[str, MetadataValue] = {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    for ours, theirs in (
        ("rope.scaling.original_context_length", "original_max_position_embeddings"),
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ):
        if scaling.get(theirs) is not None:
            values[ours] = scaling[theirs]
    if attention is not None:  # GGUF's multiplies YaRN's own, transformers' takes its place
        if not isinstance(attention, int | float):
            raise ModelError(path, f"'attention_factor' is {attention!r}, a number is expected")
        values["rope.scaling.yarn_attn_factor"] = attention / (0.1 * math.log(factor) + 1)
    return values
