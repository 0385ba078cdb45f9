"""Folders of Step-3.5 (`step3p5`) and of Step-3.7's text (`step3p7`), as they are published and as transformers writes
them: lists by layer, which may go on for the layers that predict further tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import (
    FULL,
    SLIDING,
    integer,
    layer_flags,
    layer_types,
    limits,
    number,
    windows_of,
)
from moeserve.models.sources.huggingface.llama3_rope import ROTATED, is_llama3, llama3_rope, rope_factors
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.next_token_names import NESTED
from moeserve.models.sources.huggingface.rope_by_kind import check_unscaled, rope_by_kind

FIRST_SPARSE: Final = 3  # without a setting, layers before it have no experts
SHARES: Final = {FULL: 0.5, SLIDING: 1.0}  # how much of a head rotates, the only ones that GGUF files have
THETA: Final = 1e4  # transformers' default
_BY_LAYER: Final = (  # lists that may go on for further layers
    *("layer_types", "mlp_layer_types", "rope_theta", "partial_rotary_factors", "use_rope_layers"),
    *("swiglu_limits", "swiglu_limits_shared"),
)


def _of_layers(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with lists of the layers that are run only. Raises ModelError."""
    layers, further = (
        integer(path, config, "num_hidden_layers"),
        integer(path, config, "num_nextn_predict_layers", 0, low=0),
    )
    found = dict(config)
    for name in _BY_LAYER:
        value = config.get(name)
        if isinstance(value, list) and len(value) == layers + further:
            found[name] = value[:layers]
    return found


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, what differs between layers. Raises ModelError for a missing or unsupported
    setting."""
    of_all = config.get("layer_types")
    config = _of_layers(path, config)
    layers = integer(path, config, "num_hidden_layers")
    of_blocks = of_all[layers:] if isinstance(of_all, list) else []
    types = layer_types(path, config, layers) or [FULL] * layers
    heads, kv_heads = integer(path, config, "num_attention_heads"), _kv_heads(path, config)
    windowed, windowed_kv = _windowed_heads(path, config, heads, kv_heads)
    return {
        "attention.head_count": _of_kinds(types, heads, windowed),
        "attention.head_count_kv": _of_kinds(types, kv_heads, windowed_kv),
        **windows_of(types),
        n.DENSE_LAYERS: np.array(_without_experts(path, config, layers)),
        "swiglu_clamp_exp": limits(path, config, "swiglu_limits", layers),
        "swiglu_clamp_shexp": limits(path, config, "swiglu_limits_shared", layers),
        **({n.NEXT_TOKEN_WINDOWED: of_blocks[0] == SLIDING} if of_blocks else {}),
        **({n.SLIDING_WINDOW: integer(path, config, "sliding_window")} if SLIDING in types else {}),
    }


def _of_kinds(types: list[str], full: int, windowed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([windowed if kind == SLIDING else full for kind in types], np.int64)


def _kv_heads(path: Path, config: Mapping[str, Any]) -> int:
    own = config.get("num_attention_groups") is not None
    return integer(path, config, "num_attention_groups" if own else "num_key_value_heads")


def _windowed_heads(path: Path, config: Mapping[str, Any], heads: int, kv_heads: int) -> tuple[int, int]:
    """Returns the heads and KV heads of layers with a window."""
    other = config.get("attention_other_setting") or {}
    if not isinstance(other, dict) or other.get("attention_type", SLIDING) != SLIDING:
        raise SettingError(
            path, f"'attention_other_setting' is {other!r:.80}; an object for {SLIDING} is expected"
        )
    dim = integer(path, config, "head_dim")
    for name in ("head_dim", "true_head_dim"):
        if integer(path, other, name, dim) != dim:
            raise SettingError(
                path, f"{name!r} of {SLIDING} is {other[name]!r}; only the others' {dim} is supported"
            )
    if config.get("num_sliding_attention_heads") is not None:
        return integer(path, config, "num_sliding_attention_heads"), kv_heads
    return integer(path, other, "num_attention_heads", heads), integer(
        path, other, "num_attention_groups", kv_heads
    )


def _without_experts(path: Path, config: Mapping[str, Any], layers: int) -> list[bool]:
    kinds = layer_flags(path, config, layers, "mlp_layer_types", ("sparse", "dense"))
    if kinds is not None:
        return kinds
    listed = config.get("moe_layers_enum")
    if listed is None:
        return [layer < FIRST_SPARSE for layer in range(layers)]
    numbers = [part.strip() for part in listed.split(",")] if isinstance(listed, str) else listed
    if not isinstance(numbers, list) or not all(str(each).isdecimal() for each in numbers if each != ""):
        raise SettingError(path, f"'moe_layers_enum' is {listed!r:.80}; numbers of layers are expected")
    sparse = {int(each) for each in numbers if each != ""}
    return [layer not in sparse for layer in range(layers)]


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE by kind of layer; only that of layers without a window may be
    scaled, by Llama 3's rule. Raises ModelError for a missing or unsupported setting."""
    config = _of_layers(path, config)
    head_dim = integer(path, config, "head_dim")
    full, windowed = _kinds(path, config)
    for kind, settings in ((FULL, full), (SLIDING, windowed)):
        share = settings.get("partial_rotary_factor", 1.0)
        if settings and share != SHARES[kind]:
            raise SettingError(
                path, f"'partial_rotary_factor' of {kind} is {share!r:.40}; only {SHARES[kind]} is supported"
            )
    check_unscaled(path, windowed, SLIDING)
    values: dict[str, MetadataValue] = {"rope.dimension_count": head_dim}
    if windowed:
        values["rope.freq_base_swa"] = number(path, windowed, "rope_theta", 2, 1e12)
    scaled = {key: value for key, value in full.items() if key != "partial_rotary_factor"}
    if is_llama3({"rope_parameters": scaled}):
        rotated = int(head_dim * SHARES[FULL])
        return values | llama3_rope(path, {"rope_parameters": scaled}, THETA) | {ROTATED: rotated}
    check_unscaled(path, full, FULL)
    return values | {"rope.freq_base": number(path, full, "rope_theta", 2, 1e12)}


def _kinds(path: Path, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns RoPE's settings of layers without a window and of those with one (empty if there are none)."""
    if config.get("rope_parameters"):
        return rope_by_kind(path, config)
    layers = integer(path, config, "num_hidden_layers")
    types = layer_types(path, config, layers) or [FULL] * layers
    bases, shares = config.get("rope_theta", THETA), config.get("partial_rotary_factors")
    scaling = config.get("rope_scaling") or {}
    only = config.get("yarn_only_types")
    if not isinstance(scaling, dict) or (scaling and only not in (None, [FULL])):
        raise SettingError(
            path,
            f"'yarn_only_types' is {only!r:.80} and 'rope_scaling' {scaling!r:.80}; "
            f"only scaling of {FULL} is supported",
        )
    found: dict[str, dict[str, Any]] = {FULL: {}, SLIDING: {}}
    for name, given in (("rope_theta", bases), ("partial_rotary_factor", shares)):
        by_layer = given if isinstance(given, list) else [given] * layers
        for kind in {*types}:
            of_kind = {value for value, each in zip(by_layer, types, strict=False) if each == kind}
            if len(by_layer) != layers or len(of_kind) != 1:
                raise SettingError(
                    path,
                    f"{name!r} is {given!r:.80}; one value for each layer, equal in layers of a kind, is expected",
                )
            if of_kind != {None}:
                found[kind][name] = of_kind.pop()
    return found[FULL] | scaling, found[SLIDING]


def check(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for settings that would be computed wrongly."""
    scalar, dim = config.get("query_pre_attn_scalar"), config.get("head_dim")
    if scalar is not None and scalar != dim:
        raise SettingError(
            path, f"'query_pre_attn_scalar' is {scalar!r}; only the head's width, {dim!r}, is supported"
        )
    rotates = config.get("use_rope_layers") or []
    if not isinstance(rotates, list) or not all(rotates):
        raise SettingError(
            path, f"'use_rope_layers' is {rotates!r:.80}; only RoPE in all layers is supported"
        )


NORMS: Final = frozenset(
    {n.OUTPUT_NORM, *map(n.of_part, (n.ATTN_NORM, n.FFN_NORM, n.ATTN_Q_NORM, n.ATTN_K_NORM, *n.NEXTN_NORMS))}
)
MAPPING: Final = HuggingFaceMapping(
    model_type="step3p5",
    wrapped_in="step3p7",
    keys={
        **{
            ours: theirs
            for ours, theirs in DECODER_KEYS.items()
            if not ours.startswith("attention.head_count")
        },
        "context_length": ("max_position_embeddings", "max_seq_len"),
        "feed_forward_length": ("intermediate_size",),
        "expert_count": ("moe_num_experts", "n_routed_experts"),
        "expert_used_count": ("moe_top_k", "num_experts_per_tok"),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_feed_forward_length": ("share_expert_dim", "share_expert_dims"),
        "expert_weights_scale": ("moe_router_scaling_factor",),
    },
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_act": ("silu", "silu"),
        "norm_expert_weight": (True, True),
        "moe_router_activation": ("sigmoid", "sigmoid"),
        "use_moe_router_bias": (True, True),
        "use_head_wise_attn_gate": (True, True),
        "moe_every_n_layer": (1, 1),
        "moe_layer_offset": (0, 0),
        **dict.fromkeys(
            ("attention_bias", "mlp_bias", "sink", "use_bidirectional_attention"), (False, False)
        ),
    },
    check=check,
    derived=derived,
    rope=rope,
    made_of_none=rope_factors,
    layer=DECODER_LAYER | DECODER_QK_NORMS | {n.of_part(n.ATTN_GATE): "self_attn.g_proj.weight"},
    moe={
        n.of_part(n.FFN_GATE_INP): "moe.gate.weight",
        n.bias_of_part(n.EXP_PROBS_B): "moe.router_bias",
        n.of_part(n.FFN_GATE_EXPS): "moe.gate_proj.weight",
        n.of_part(n.FFN_UP_EXPS): "moe.up_proj.weight",
        n.of_part(n.FFN_DOWN_EXPS): "moe.down_proj.weight",
        n.of_part(n.FFN_GATE_SHEXP): "share_expert.gate_proj.weight",
        n.of_part(n.FFN_UP_SHEXP): "share_expert.up_proj.weight",
        n.of_part(n.FFN_DOWN_SHEXP): "share_expert.down_proj.weight",
    },
    dense=DENSE_FFN,
    less_one=NORMS,
    next_token=NESTED,
    skipped_layers=("num_nextn_predict_layers",),
)
