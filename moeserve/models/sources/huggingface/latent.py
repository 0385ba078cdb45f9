"""Converts tensors and settings of latent attention from checkpoints' form to GGUF's: settings that several keys
determine together, and the merged up-projection of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue

from .made_tensor import MadeTensor, find_tensor, values_made
from .safetensors_file import StoredTensor

SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers for `scoring_func`
V2 = "deepseek_v2"  # model_type
KEYS = {  # for `HuggingFaceMapping.keys`
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.value_length_mla": ("v_head_dim",),
}
_SCORING = {"softmax": SOFTMAX, "sigmoid": SIGMOID}
_CHOICES = {  # supported values of `topk_method`, the default first
    SIGMOID: ("noaux_tc",),
    SOFTMAX: ("greedy", "group_limited_greedy"),
}


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns the keys that are determined by several settings together. Raises ModelError for settings that would be
    computed wrongly."""
    scoring = _scoring(path, config)
    key_parts = [config.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if not all(isinstance(part, int) for part in key_parts):
        raise SettingError(path, "'qk_nope_head_dim' or 'qk_rope_head_dim' is missing")
    values: dict[str, MetadataValue] = {
        "attention.head_count_kv": 1,
        "attention.key_length_mla": sum(part for part in key_parts if part is not None),
        "expert_gating_func": scoring,
    }
    if scoring == SOFTMAX and config.get("topk_method") in (None, "greedy"):
        values |= {"expert_group_count": 1, "expert_group_used_count": 1}
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        dense = kinds.count("dense") if isinstance(kinds, list) else 0
        if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
            raise SettingError(
                path,
                f"'mlp_layer_types' is {kinds!r}; only dense layers before all sparse ones are supported",
            )
        values["leading_dense_block_count"] = dense
    return values | _magnitude(path, config)


def _magnitude(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns YaRN's factor for attention scores. Angles use the quotient of the two settings, which is 1 if they
    are equal."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) != "yarn":
        return {}
    of_angles, of_scores = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if not isinstance(of_scores, int | float) or not of_scores or of_angles != of_scores:
        raise SettingError(
            path,
            f"'mscale' is {of_angles!r} and 'mscale_all_dim' {of_scores!r}; only two equal numbers are supported",
        )
    if scaling.get("attention_factor") is not None:
        raise SettingError(path, "'attention_factor' beside 'mscale' is not supported")
    return {n.YARN_LOG_MULTIPLIER: 0.1 * of_scores}


def _scoring(path: Path, config: Mapping[str, Any]) -> int:
    default = "softmax" if config.get("model_type") == V2 else "sigmoid"
    name = config.get("scoring_func") or default
    if name not in _SCORING:
        raise SettingError(path, f"'scoring_func' is {name!r}; only {' and '.join(_SCORING)} are supported")
    scoring = _SCORING[name]
    choice = config.get("topk_method")
    if choice is not None and choice not in _CHOICES[scoring]:
        raise SettingError(
            path,
            f"'topk_method' is {choice!r}; only {' and '.join(_CHOICES[scoring])} are supported with {name} scores",
        )
    return scoring


def made_tensors(
    path: Path,
    prefix: str,
    metadata: Metadata,
    stored: dict[str, StoredTensor],
    under: str = "self_attn.",
) -> Iterator[tuple[str, MadeTensor]]:
    """Yields the up-projections of keys (transposed) and values, by head, from the merged matrix, and removes that
    matrix from `stored`. under: the beginning of the matrix's name after `prefix`. Yields nothing without it. Raises
    ModelError if its rows do not fit the heads."""
    name = f"{prefix}{under}kv_b_proj.weight"
    if name not in stored:
        return
    matrix = find_tensor(path, stored, name, 2)
    architecture = metadata.require_str("general.architecture")
    heads, key, value = (
        metadata.require_int(f"{architecture}.{suffix}", 1, 2048)
        for suffix in ("attention.head_count", "attention.key_length_mla", "attention.value_length_mla")
    )
    rotary = metadata.require_int(f"{architecture}.rope.dimension_count", 0, 2048)
    rows, rank = matrix.shape
    nope = key - rotary
    if nope < 1 or rows != heads * (nope + value):
        raise SettingError(
            path,
            f"tensor {name!r} has {rows} rows, but config.json's heads need {heads} x ({nope} + {value})",
        )

    def part(chosen: slice, *, transposed: bool) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
        def choose(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
            by_head = numbers.reshape(heads, nope + value, rank)[:, chosen]
            return np.swapaxes(by_head, 1, 2) if transposed else by_head

        return choose

    yield n.of_part(n.ATTN_K_B), values_made(matrix, (heads, rank, nope), part(slice(nope), transposed=True))
    yield (
        n.of_part(n.ATTN_V_B),
        values_made(matrix, (heads, value, rank), part(slice(nope, None), transposed=False)),
    )
    del stored[name]
