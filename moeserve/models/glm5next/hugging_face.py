"""Folders of GLM-5.3-Flash: the text model of a multimodal one, or alone, in the names in which it is published."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface import latent
from moeserve.models.sources.huggingface.layer_settings import (
    FULL,
    integer,
    layer_types,
    leading_dense_layers,
    number,
)
from moeserve.models.sources.huggingface.mapping import (
    DECODER_LAYER,
    DENSE_FFN,
    GROUPED_ROUTER_KEYS,
    HEAD_DIM,
    LAYERWISE_DECODER_KEYS,
    MOE_EXPERTS,
    MOE_ROUTER,
    SHARED_EXPERTS,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.next_token_names import BEHIND_LAYERS
from moeserve.models.sources.huggingface.remade import (
    Made,
    decay_rate,
    delta_convolutions,
    made_by,
    together,
)
from moeserve.models.sources.huggingface.rope_by_kind import no_rope

LINEAR: Final = "linear_attention"
INDEXED: Final = "indexed_attention"
PERIOD: Final = 4  # layers: without a setting, layers 3, 7, ... attend, counted from 0
_LINEAR: Final = "linear_attn_config"
_LINEAR_SETTINGS: Final = {  # the name in `linear_attn_config` -> the one outside it, and its default
    "head_dim": ("linear_head_dim", 128),
    "num_heads": ("linear_num_heads", 64),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 4),
}
_BOUND: Final = ("gate_lower_bound", "linear_lower_bound")


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the kinds of layers and the sizes of each, from config.json. Raises ModelError for a
    missing or unsupported setting."""
    heads = integer(path, config, "num_attention_heads")
    linear = {name: _of_linear(path, config, name) for name in _LINEAR_SETTINGS}
    if linear["num_heads"] != heads:
        raise SettingError(
            path,
            f"'num_heads' of linear attention is {linear['num_heads']}; "
            f"only 'num_attention_heads', {heads}, is supported",
        )
    layers = integer(path, config, "num_hidden_layers")
    rank, key = integer(path, config, "kv_lora_rank"), integer(path, config, "qk_nope_head_dim")
    limits = np.full(layers, number(path, config, "swiglu_limit", 0.0, 1e6, default=10.0), np.float32)
    return {
        "attention.head_count_kv": np.array(_kv_heads(path, config, layers), np.int32),
        HEAD_DIM: rank,
        "attention.value_length": rank,
        "attention.key_length_mla": key,
        "rope.dimension_count": 0,
        "kda.head_dim": linear["head_dim"],
        "ssm.conv_kernel": linear["short_conv_kernel_size"],
        "kda.gate_lower_bound": _lower_bound(path, config),
        "expert_gating_func": latent.SIGMOID,
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
        "attention.indexer.kpool": integer(path, config, "index_kpool", 16),
        "attention.indexer.kpool_select_tail": config.get("index_kpool_always_select_tail", True),
        **leading_dense_layers(path, config),
    }


def _linear_settings(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    linear = config.get(_LINEAR) or {}
    if not isinstance(linear, dict):
        raise SettingError(path, f"{_LINEAR!r} is {linear!r:.80}; an object is expected")
    return linear


def _of_linear(path: Path, config: Mapping[str, Any], inside: str) -> int:
    linear, (outside, default) = _linear_settings(path, config), _LINEAR_SETTINGS[inside]
    return integer(path, linear, inside) if inside in linear else integer(path, config, outside, default)


def _lower_bound(path: Path, config: Mapping[str, Any]) -> float:
    """Returns the least logarithm of a decay; 0 if there is none."""
    linear, (inside, outside) = _linear_settings(path, config), _BOUND
    settings, name = (linear, inside) if inside in linear else (config, outside)
    is_safe = bool(linear) and linear.get("safe_gate", True)
    if name in settings and settings[name] is None and not is_safe:
        return 0.0
    return number(path, settings, name, -1e3, 0.0, default=-5.0)


def _kv_heads(path: Path, config: Mapping[str, Any], layers: int) -> list[int]:
    """Returns 1 for each layer that attends, 0 for the others."""
    types = layer_types(path, config, layers, (LINEAR, FULL, INDEXED))
    if types is not None:
        return [int(each != LINEAR) for each in types]
    return [int(layer % PERIOD == PERIOD - 1) for layer in range(layers)]


def check(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError if layers that attend share a choice of keys."""
    kinds, layers = config.get("indexer_types"), config.get("num_hidden_layers")
    if kinds is not None and (not isinstance(kinds, list) or set(kinds[:layers]) - {"full"}):
        raise SettingError(
            path, f"'indexer_types' is {kinds!r:.120}; only 'full' for each layer is supported"
        )


MIXERS: Final = {
    **{name: theirs for name, theirs in DECODER_LAYER.items() if "self_attn" in theirs},
    n.of_part(n.ATTN_Q_A): "self_attn.q_a_proj.weight",
    n.of_part(n.ATTN_Q_A_NORM): "self_attn.q_a_layernorm.weight",
    n.of_part(n.ATTN_Q_B): "self_attn.q_b_proj.weight",
    n.of_part(n.ATTN_KV_A_MQA): "self_attn.kv_a_proj_with_mqa.weight",
    n.of_part(n.ATTN_KV_A_NORM): "self_attn.kv_a_layernorm.weight",
    n.of_part(n.INDEXER_K): "self_attn.indexer.wk.weight",
    n.of_part(n.INDEXER_Q_B): "self_attn.indexer.wq_b.weight",
    n.of_part(n.INDEXER_PROJ): "self_attn.indexer.weights_proj.weight",
    n.of_part(n.INDEXER_K_NORM): "self_attn.indexer.k_norm.weight",
    n.bias_of_part(n.INDEXER_K_NORM): "self_attn.indexer.k_norm.bias",
    n.of_part(n.INDEX_POOLS.bias): "self_attn.indexer.index_kpool_compress_ape",
    n.of_part(n.INDEX_POOLS.gate): "self_attn.indexer.index_kpool_compress_gate",
    n.of_part(n.SSM_BETA): "self_attn.b_proj.weight",
    n.of_part(n.SSM_G_A): "self_attn.g_a_proj.weight",
    n.of_part(n.SSM_G_B): "self_attn.g_b_proj.weight",
    n.of_part(n.SSM_F_A): "self_attn.f_a_proj.weight",
    n.of_part(n.SSM_F_B): "self_attn.f_b_proj.weight",
    n.bias_of_part(n.SSM_DT): "self_attn.dt_bias",
    n.of_part(n.SSM_NORM): "self_attn.o_norm.weight",
}
_STREAMS: Final = {
    n.of_part(f"{ours}_{part}"): f"{ours}_{part}"
    for ours in (n.HC_ATTN, n.HC_FFN)
    for part in ("fn", "base", "scale")
}
CHOICE_BIAS: Final = n.bias_of_part(n.EXP_PROBS_B)
_MADE: Final[Made] = together(
    latent.made_tensors, made_by(*delta_convolutions("self_attn."), decay_rate(n.SSM_A, "self_attn.A_log", 1))
)

MAPPING: Final = HuggingFaceMapping(
    model_type="glm5_next_text",
    wrapped_in="glm5_next",
    keys={
        **LAYERWISE_DECODER_KEYS,
        **GROUPED_ROUTER_KEYS,
        "feed_forward_length": ("intermediate_size",),
        **latent.KEYS,
        "attention.indexer.head_count": ("index_n_heads",),
        "attention.indexer.key_length": ("index_head_dim",),
        "attention.indexer.top_k": ("index_topk",),
        "expert_count": ("n_routed_experts", "num_local_experts"),
        "expert_used_count": ("num_experts_per_tok",),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_count": ("n_shared_experts",),
        "hyper_connection.count": ("hc_mult",),
        "hyper_connection.sinkhorn_iterations": ("hc_sinkhorn_iters",),
        "hyper_connection.epsilon": ("hc_eps",),
    },
    defaults={"expert_weights_norm": True},
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_act": ("silu", "silu"),
        "attention_bias": (False, False),
        "mla_use_nope": (True, True),
        "qk_rope_head_dim": (0, 0),
        "scoring_func": ("sigmoid", "sigmoid"),
        "topk_method": ("noaux_tc", "noaux_tc"),
    },
    layer=MIXERS | _STREAMS | {name: theirs for name, theirs in DECODER_LAYER.items() if "norm" in theirs},
    moe=MOE_ROUTER | SHARED_EXPERTS | {CHOICE_BIAS: "mlp.gate.e_score_correction_bias"},
    dense=DENSE_FFN,
    experts=MOE_EXPERTS,
    optional=frozenset(MIXERS | SHARED_EXPERTS) | {CHOICE_BIAS},
    made=_MADE,
    derived=derived,
    check=check,
    rope=no_rope,
    next_token=BEHIND_LAYERS,
    skipped_layers=("num_nextn_predict_layers",),
)
