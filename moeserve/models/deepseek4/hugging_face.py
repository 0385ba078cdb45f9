"""How to read folders of DeepSeek-V4 and V4-Flash: config.json as DeepSeek and as transformers write it, and the
published names of tensors (https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.experts_by_token import made_tensors
from moeserve.models.sources.huggingface.layer_settings import integer, number
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    HEAD_DIM,
    MOE_KEYS,
    HuggingFaceMapping,
)

SQRT_SOFTPLUS: Final = 4  # llama.cpp's number of the router's scores
_WINDOW, _CHOSEN, _ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATIOS: Final = {_WINDOW: 0, _CHOSEN: 4, _ALL: 128}  # published models' tokens of an entry
_HASHED: Final = "hash_moe"
_HASHED_LAYERS: Final = 3  # transformers' default

_ATTENTION = {
    n.of_part(n.ATTN_NORM): "attn_norm.weight",
    n.of_part(n.FFN_NORM): "ffn_norm.weight",
    n.of_part(n.ATTN_Q_A): "attn.wq_a.weight",
    n.of_part(n.ATTN_Q_A_NORM): "attn.q_norm.weight",
    n.of_part(n.ATTN_Q_B): "attn.wq_b.weight",
    n.of_part(n.ATTN_KV): "attn.wkv.weight",
    n.of_part(n.ATTN_KV_A_NORM): "attn.kv_norm.weight",
    n.of_part(n.ATTN_SINKS): "attn.attn_sink",
    n.of_part(n.ATTN_OUTPUT_A): "attn.wo_a.weight",
    n.of_part(n.ATTN_OUTPUT_B): "attn.wo_b.weight",
}
_STREAMS = {
    n.of_part(f"{ours}_{part}"): f"{ours}_{part}"
    for ours in (n.HC_ATTN, n.HC_FFN)
    for part in ("fn", "base", "scale")
}
_INDEXER = {
    n.of_part(n.INDEXER_Q_B): "attn.indexer.wq_b.weight",
    n.of_part(n.INDEXER_PROJ): "attn.indexer.weights_proj.weight",
}
_COMPRESSORS = {
    n.of_part(ours): f"attn.{under}compressor.{theirs}"
    for names, under in zip(n.COMPRESSORS, ("", "indexer."), strict=True)
    for ours, theirs in (
        (names.kv, "wkv.weight"),
        (names.gate, "wgate.weight"),
        (names.bias, "ape"),
        (names.norm, "norm.weight"),
    )
}
_CHOICE_BIAS = {n.bias_of_part(n.EXP_PROBS_B): "ffn.gate.bias"}
_SHARED = {
    n.of_part(n.FFN_GATE_SHEXP): "ffn.shared_experts.w1.weight",
    n.of_part(n.FFN_UP_SHEXP): "ffn.shared_experts.w3.weight",
    n.of_part(n.FFN_DOWN_SHEXP): "ffn.shared_experts.w2.weight",
}


def _ratios(path: Path, config: Mapping[str, Any], layers: int) -> list[int]:
    """Returns each layer's tokens of an entry. Raises ModelError."""
    stated, kinds = config.get("compress_ratios"), config.get("layer_types")
    if kinds is None and _are_integers(stated) and len(stated) >= layers:  # next-token layers follow
        return stated[:layers]
    rates = config.get("compress_rates") or {}
    names = [*_RATIOS]
    if not isinstance(kinds, list) or len(kinds) < layers or any(kind not in names for kind in kinds):
        raise SettingError(path, f"'layer_types' is {kinds!r}; one of {names} for each layer is expected")
    ratios = [rates.get(kind, _RATIOS[kind]) for kind in kinds[:layers]]
    if not _are_integers(ratios):
        raise SettingError(path, f"'compress_rates' is {rates!r}; numbers of tokens are expected")
    return ratios


def _are_integers(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _hashed(path: Path, config: Mapping[str, Any], layers: int) -> int:
    """Returns how many layers choose experts by token id. Raises ModelError."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return min(layers, integer(path, config, "num_hash_layers", _HASHED_LAYERS, low=0))
    count = kinds.count(_HASHED) if isinstance(kinds, list) else -1
    if count < 0 or len(kinds) < layers or _HASHED in kinds[count:]:
        raise SettingError(
            path, f"'mlp_layer_types' is {kinds!r}; 'hash_moe' is supported in the first layers"
        )
    return count


def _derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the settings that are lists or have another form, from config.json. Raises
    ModelError."""
    layers = integer(path, config, "num_hidden_layers")
    limits = np.full(layers, number(path, config, "swiglu_limit", 0.0, 1e6, default=10.0), np.float32)
    return {
        "attention.compress_ratios": np.array(_ratios(path, config, layers), np.int32),
        "hash_layer_count": _hashed(path, config, layers),
        "expert_gating_func": SQRT_SOFTPLUS,
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
        "rope.dimension_count": _rotated(path, config),
    }


def _rotated(path: Path, config: Mapping[str, Any]) -> int:
    if config.get("qk_rope_head_dim") is not None:
        return integer(path, config, "qk_rope_head_dim")
    factor = number(path, config, "partial_rotary_factor", 0.0, 1.0, default=0.125)
    return int(integer(path, config, "head_dim") * factor)


def _rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE: transformers writes it for layers without entries, `main`, and
    with them, `compress`. Raises ModelError."""
    both = config.get("rope_parameters")
    scaling = config.get("rope_scaling")
    theta, entries = config.get("rope_theta"), config.get("compress_rope_theta")
    if (
        isinstance(both, dict)
        and isinstance(both.get("main"), dict)
        and isinstance(both.get("compress"), dict)
    ):
        scaling = both["compress"]
        theta, entries = both["main"].get("rope_theta", theta), scaling.get("rope_theta", entries)
    if scaling is not None and not isinstance(scaling, dict):
        raise SettingError(path, f"'rope_scaling' is {scaling!r}; an object is expected")
    # The family leaves out YaRN's magnitude by itself.
    left_out = ("partial_rotary_factor", "attention_factor", "rope_theta")
    kept = {name: value for name, value in (scaling or {}).items() if name not in left_out}
    magnitude = (scaling or {}).get("attention_factor", 1.0)
    if magnitude != 1.0:
        raise SettingError(path, f"'attention_factor' is {magnitude!r}; only 1 is supported")
    values = rope_of(path, {"rope_theta": theta, "rope_parameters": kept}, MAPPING)
    return values | {"attention.compress_rope_freq_base": 160000.0 if entries is None else entries}


MAPPING = HuggingFaceMapping(
    model_type="deepseek_v4",
    keys=DECODER_KEYS
    | MOE_KEYS
    | {
        HEAD_DIM: ("head_dim",),
        "attention.value_length": ("head_dim",),
        "attention.q_lora_rank": ("q_lora_rank",),
        "attention.sliding_window": ("sliding_window",),
        "attention.output_group_count": ("o_groups",),
        "attention.output_lora_rank": ("o_lora_rank",),
        "attention.indexer.head_count": ("index_n_heads",),
        "attention.indexer.key_length": ("index_head_dim",),
        "attention.indexer.top_k": ("index_topk",),
        "expert_count": ("n_routed_experts", "num_local_experts"),
        "expert_shared_count": ("n_shared_experts",),
        "expert_weights_norm": ("norm_topk_prob",),
        "expert_weights_scale": ("routed_scaling_factor",),
        "hyper_connection.count": ("hc_mult",),
        "hyper_connection.sinkhorn_iterations": ("hc_sinkhorn_iters",),
        "hyper_connection.epsilon": ("hc_eps",),
    },
    fixed={
        "hidden_act": ("silu", "silu"),
        "scoring_func": ("sqrtsoftplus", "sqrtsoftplus"),
        "attention_bias": (False, False),
        "mlp_bias": (False, False),
        "tie_word_embeddings": (False, False),
    },
    layer=_ATTENTION | _STREAMS | _INDEXER | _COMPRESSORS,
    moe={n.of_part(n.FFN_GATE_INP): "ffn.gate.weight"} | _CHOICE_BIAS | _SHARED,
    experts={
        n.of_part(n.FFN_GATE_EXPS): "w1.weight",
        n.of_part(n.FFN_UP_EXPS): "w3.weight",
        n.of_part(n.FFN_DOWN_EXPS): "w2.weight",
    },
    experts_under="ffn.experts",
    outside={n.of_part(f"{n.OUTPUT_HC}_{part}"): f"model.hc_head_{part}" for part in ("fn", "base", "scale")},
    optional=frozenset(_INDEXER | _COMPRESSORS | _CHOICE_BIAS | _SHARED),
    made=made_tensors,
    derived=_derived,
    rope=_rope,
    renamed={
        "layers.": "model.layers.",
        "embed.": "model.embed_tokens.",
        "norm.": "model.norm.",
        "head.": "lm_head.",
        "hc_head_": "model.hc_head_",
        "model.hc_head.hc_": "model.hc_head_",  # transformers' names
    },
    skipped=("mtp.",),
)
