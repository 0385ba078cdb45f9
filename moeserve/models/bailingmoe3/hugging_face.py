"""Folders of Ling 3 and Ring 3, as they are published and as transformers writes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
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
    limits,
    number,
)
from moeserve.models.sources.huggingface.mapping import (
    DENSE_FFN,
    LAYERWISE_DECODER_KEYS,
    MOE_EXPERTS,
    MOE_ROUTER,
    SHARED_EXPERTS,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.next_token_names import NextTokenNames
from moeserve.models.sources.huggingface.remade import (
    Remade,
    delta_convolutions,
    made_by,
    named_by_kind,
    stored_as,
    together,
)

LINEAR: Final = "linear_attention"
_UNDER: Final = "attention."


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the kinds of layers, the sizes of each, and the limits of feed-forwards, from
    config.json. Raises ModelError for a missing or unsupported setting."""
    layers = integer(path, config, "num_hidden_layers")
    key_dims = (integer(path, config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    return {
        "attention.head_count_kv": np.array(_kv_heads(path, config, layers), np.int32),
        "attention.key_length_mla": sum(key_dims),
        # transformers writes the rotated width as `head_dim`, and this one beside it.
        "kda.head_dim": integer(path, config, _first_of(config, "linear_head_dim", "head_dim")),
        "kda.gate_lower_bound": number(path, config, "kda_lower_bound", -1e3, -1e-3, default=-5.0),
        "expert_gating_func": latent.SIGMOID,
        "expert_shared_feed_forward_length": _shared_width(path, config),
        "swiglu_clamp_exp": _limits(path, config, "expert_swiglu_limit_list", layers),
        "swiglu_clamp_shexp": _limits(path, config, "share_expert_swiglu_limit_list", layers),
        **leading_dense_layers(path, config),
    }


def _first_of(config: Mapping[str, Any], *names: str) -> str:
    """Returns the first of these settings that config.json has; the last if it has none."""
    return next((name for name in names if config.get(name) is not None), names[-1])


def _kv_heads(path: Path, config: Mapping[str, Any], layers: int) -> list[int]:
    """Returns 1 for each layer that attends, 0 for the others. Layers behind the last whole group attend."""
    types = layer_types(path, config, layers, (LINEAR, FULL))
    if types is not None:
        return [int(each == FULL) for each in types]
    group = integer(path, config, "layer_group_size", 6)
    return [int((layer + 1) % group == 0 or layer >= layers // group * group) for layer in range(layers)]


def _shared_width(path: Path, config: Mapping[str, Any]) -> int:
    """Returns the width of all shared experts together."""
    of_one = _first_of(config, "moe_shared_expert_intermediate_size", "moe_intermediate_size")
    count = integer(path, config, _first_of(config, "num_shared_experts", "n_shared_experts"), 1, low=0)
    return count * integer(path, config, of_one)


def _limits(path: Path, config: Mapping[str, Any], name: str, layers: int) -> MetadataValue:
    """Returns the limit of each layer, next-token layers included. A list may lack the last ones. transformers' code
    ignores limits, with which the published models were trained."""
    given = config.get(name)
    layers += integer(path, config, "num_nextn_predict_layers", 0, low=0)
    padded = [*given, *[None] * layers][:layers] if isinstance(given, list) else given
    return limits(path, {name: padded}, name, layers)


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE, which rotates `qk_rope_head_dim` numbers whatever
    `partial_rotary_factor` says. Raises ModelError for a missing or unsupported setting."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = settings.get("rope_type", settings.get("type")) if isinstance(settings, dict) else settings
    if kind not in (None, "default"):
        raise SettingError(path, f"'rope_type' is {kind!r:.80}; only 'default' is supported")
    source = settings if settings.get("rope_theta") is not None else config
    return {"rope.freq_base": number(path, source, "rope_theta", 2.0, 1e12, default=6e6)}


def check(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for Ling 2.5, whose config.json has the same model_type."""
    if "V2_5" in str(config.get("architectures")):
        raise SettingError(
            path, f"'architectures' is {config['architectures']!r:.80}; only Ling 3 is supported"
        )


_MADE: Final = made_by(
    *delta_convolutions(_UNDER),
    Remade(n.SSM_A, f"{_UNDER}A_log", lambda shape: (int(np.prod(shape)), 1), np.exp),
)
MIXERS: Final = {
    n.of_part(part): f"{_UNDER}{name}.weight"
    for part, name in {
        n.ATTN_Q: "q_proj",
        n.ATTN_K: "k_proj",
        n.ATTN_V: "v_proj",
        n.ATTN_OUTPUT: "dense",
        n.ATTN_Q_A: "q_a_proj",
        n.ATTN_Q_A_NORM: "q_a_layernorm",
        n.ATTN_Q_B: "q_b_proj",
        n.ATTN_KV_A_MQA: "kv_a_proj_with_mqa",
        n.ATTN_KV_A_NORM: "kv_a_layernorm",
        n.SSM_BETA: "b_proj",
        n.SSM_F_A: "f_proj",
        n.SSM_NORM: "o_norm",
    }.items()
} | {n.bias_of_part(n.SSM_DT): f"{_UNDER}dt_bias"}
CHOICE_BIAS: Final = n.bias_of_part(n.EXP_PROBS_B)
_NEXT_TOKEN: Final = NextTokenNames(
    {
        n.of_part(part): f"{name}.weight"
        for part, name in {
            n.NEXTN_EH_PROJ: "eh_proj",
            n.NEXTN_ENORM: "enorm",
            n.NEXTN_HNORM: "hnorm",
            n.LAYER_OUTPUT_NORM: "final_layernorm",
        }.items()
    }
)

MAPPING: Final = HuggingFaceMapping(
    model_type="bailing_hybrid",
    other_model_types=("bailing_moe_v3",),
    keys={
        **LAYERWISE_DECODER_KEYS,
        "context_length": ("model_max_length", "max_position_embeddings"),
        "feed_forward_length": ("intermediate_size",),
        **latent.KEYS,
        "rope.dimension_count": ("qk_rope_head_dim",),
        "ssm.conv_kernel": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        "expert_count": ("num_experts", "num_local_experts"),
        "expert_used_count": ("num_experts_per_tok", "num_experts_per_token"),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_count": ("num_shared_experts", "n_shared_experts"),
        "expert_group_count": ("n_group", "num_expert_group"),
        "expert_group_used_count": ("topk_group",),
        "expert_weights_norm": ("norm_topk_prob", "moe_renormalize"),
        "expert_weights_scale": ("routed_scaling_factor",),
    },
    defaults={"expert_weights_norm": True},
    # setting: (the only supported value, the default)
    fixed={
        "hidden_act": ("silu", "silu"),
        **dict.fromkeys(("attention_bias", "use_bias", "use_qkv_bias", "norm_has_bias"), (False, False)),
        **dict.fromkeys(("use_kda_lora", "use_mla_nope", "use_nGPT", "mtp_use_kda"), (False, False)),
        **dict.fromkeys(("scale_router_input", "up_proj_norm", "value_norm"), (False, False)),
        **dict.fromkeys(("no_kda_lora", "kda_safe_gate", "rope_interleave"), (True, True)),
        "gated_attention_proj_granularity_type": ("head_wise", "head_wise"),
        "score_function": ("sigmoid", "sigmoid"),
        "scoring_func": ("sigmoid", "sigmoid"),
        "topk_method": ("noaux_tc", "noaux_tc"),
    },
    layer=MIXERS
    | {
        n.of_part(n.ATTN_NORM): "input_layernorm.weight",
        n.of_part(n.FFN_NORM): "post_attention_layernorm.weight",
    },
    moe=MOE_ROUTER | SHARED_EXPERTS | {CHOICE_BIAS: "mlp.gate.expert_bias"},
    dense=DENSE_FFN,
    experts=MOE_EXPERTS,
    optional=frozenset(MIXERS | SHARED_EXPERTS) | {CHOICE_BIAS},
    made=together(
        named_by_kind(
            f"{_UNDER}g_proj.weight", f"{_UNDER}A_log", n.of_part(n.SSM_G_A), n.of_part(n.ATTN_GATE)
        ),
        partial(latent.made_tensors, under=_UNDER),
        _MADE,
        stored_as({n.of_part(n.ATTN_OUTPUT): f"{_UNDER}o_proj.weight"}),  # published so where a layer recurs
    ),
    derived=derived,
    check=check,
    rope=rope,
    renamed={"model.word_embeddings.": "model.embed_tokens."},
    next_token=_NEXT_TOKEN,
    skipped_layers=("num_nextn_predict_layers",),
)
