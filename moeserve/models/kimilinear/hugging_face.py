"""Folders of Kimi-Linear, as they are published and as transformers writes them. They state the kinds of layers in two
lists of layer numbers, counted from 1, or by names."""

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
)
from moeserve.models.sources.huggingface.mapping import (
    DECODER_LAYER,
    DENSE_FFN,
    LAYERWISE_DECODER_KEYS,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.remade import (
    decay_rate,
    delta_convolutions,
    made_by,
    stored_as,
    together,
)
from moeserve.models.sources.huggingface.rope_by_kind import no_rope

LINEAR: Final = "linear_attention"
PERIOD: Final = 4  # layers: without a setting, layers 4, 8, ... attend, counted from 0
_LINEAR_SETTINGS: Final = {  # GGUF's key -> the names in `linear_attn_config` and outside it
    "kda.head_dim": ("head_dim", "linear_head_dim"),
    "ssm.conv_kernel": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
}


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the kinds of layers and the sizes of each, from config.json. Raises ModelError for a
    missing or unsupported setting."""
    linear = config.get("linear_attn_config") or {}
    if not isinstance(linear, dict):
        raise SettingError(path, f"'linear_attn_config' is {linear!r:.80}; an object is expected")

    def of_linear(inside: str, outside: str) -> int:
        return integer(path, linear if inside in linear else config, inside if inside in linear else outside)

    heads = integer(path, config, "num_attention_heads")
    if of_linear("num_heads", "linear_num_heads") != heads:
        raise SettingError(
            path,
            f"'num_heads' of linear attention is not 'num_attention_heads', {heads}; only equal ones are supported",
        )
    key_dims = (integer(path, config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    return {
        "attention.head_count_kv": np.array(_kv_heads(path, config, linear), np.int32),
        "attention.key_length_mla": sum(key_dims),
        **{ours: of_linear(*theirs) for ours, theirs in _LINEAR_SETTINGS.items()},
        **leading_dense_layers(path, config),
    }


def _kv_heads(path: Path, config: Mapping[str, Any], linear: Mapping[str, Any]) -> list[int]:
    """Returns 1 for each layer that attends, 0 for the others."""
    layers = integer(path, config, "num_hidden_layers")
    types = layer_types(path, config, layers, (LINEAR, FULL))
    if types is not None:
        return [int(each == FULL) for each in types]
    attending, recurrent = linear.get("full_attn_layers"), linear.get("kda_layers")
    if attending is None and recurrent is None:
        return [int(layer > 0 and layer % PERIOD == 0) for layer in range(layers)]
    both = [attending, recurrent]
    numbers = [number for each in both if isinstance(each, list) for number in each]
    is_whole = all(isinstance(number, int) for number in numbers) and sorted(numbers) == [
        layer + 1 for layer in range(layers)
    ]
    if not is_whole or not isinstance(attending, list):
        raise SettingError(
            path,
            f"'full_attn_layers' and 'kda_layers' are {both!r:.120}; each of the layers 1 to {layers} is expected once",
        )
    return [int(layer + 1 in attending) for layer in range(layers)]


_UNDER: Final = "block_sparse_moe."
MIXERS: Final = {
    **{name: theirs for name, theirs in DECODER_LAYER.items() if "self_attn" in theirs},
    n.of_part(n.ATTN_Q_A): "self_attn.q_a_proj.weight",
    n.of_part(n.ATTN_Q_A_NORM): "self_attn.q_a_layernorm.weight",
    n.of_part(n.ATTN_Q_B): "self_attn.q_b_proj.weight",
    n.of_part(n.ATTN_KV_A_MQA): "self_attn.kv_a_proj_with_mqa.weight",
    n.of_part(n.ATTN_KV_A_NORM): "self_attn.kv_a_layernorm.weight",
    n.of_part(n.SSM_BETA): "self_attn.b_proj.weight",
    n.of_part(n.SSM_F_A): "self_attn.f_a_proj.weight",
    n.of_part(n.SSM_F_B): "self_attn.f_b_proj.weight",
    n.of_part(n.SSM_G_A): "self_attn.g_a_proj.weight",
    n.of_part(n.SSM_G_B): "self_attn.g_b_proj.weight",
    n.bias_of_part(n.SSM_DT): "self_attn.dt_bias",
    n.of_part(n.SSM_NORM): "self_attn.o_norm.weight",
}
SHARED: Final = {
    n.of_part(n.FFN_GATE_SHEXP): f"{_UNDER}shared_experts.gate_proj.weight",
    n.of_part(n.FFN_UP_SHEXP): f"{_UNDER}shared_experts.up_proj.weight",
    n.of_part(n.FFN_DOWN_SHEXP): f"{_UNDER}shared_experts.down_proj.weight",
}
CHOICE_BIAS: Final = n.bias_of_part(n.EXP_PROBS_B)

MAPPING: Final = HuggingFaceMapping(
    model_type="kimi_linear",
    keys={
        **LAYERWISE_DECODER_KEYS,
        "context_length": ("model_max_length", "max_position_embeddings"),
        "feed_forward_length": ("intermediate_size",),
        **latent.KEYS,
        "rope.dimension_count": ("qk_rope_head_dim",),
        "expert_count": ("num_experts", "num_local_experts"),
        "expert_used_count": ("num_experts_per_token", "num_experts_per_tok"),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_count": ("num_shared_experts", "n_shared_experts"),
        "expert_group_count": ("num_expert_group", "n_group"),
        "expert_group_used_count": ("topk_group",),
        "expert_weights_norm": ("moe_renormalize", "norm_topk_prob"),
        "expert_weights_scale": ("routed_scaling_factor",),
    },
    defaults={"expert_weights_norm": True},
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_act": ("silu", "silu"),
        "attention_bias": (False, False),
        "mla_use_nope": (True, True),
        "moe_router_activation_func": ("sigmoid", "sigmoid"),
        "moe_layer_freq": (1, 1),
        "num_nextn_predict_layers": (0, 0),
    },
    layer=MIXERS | {name: theirs for name, theirs in DECODER_LAYER.items() if "norm" in theirs},
    moe=SHARED
    | {
        n.of_part(n.FFN_GATE_INP): f"{_UNDER}gate.weight",
        CHOICE_BIAS: f"{_UNDER}gate.e_score_correction_bias",
    },
    dense=DENSE_FFN,
    experts={
        n.of_part(n.FFN_GATE_EXPS): "w1.weight",
        n.of_part(n.FFN_UP_EXPS): "w3.weight",
        n.of_part(n.FFN_DOWN_EXPS): "w2.weight",
    },
    experts_under=f"{_UNDER}experts",
    optional=frozenset(MIXERS | SHARED) | {CHOICE_BIAS},
    made=together(
        latent.made_tensors,
        made_by(*delta_convolutions("self_attn."), decay_rate(n.SSM_A, "self_attn.A_log", 1)),
        stored_as({name: theirs.replace("mlp.", _UNDER) for name, theirs in DENSE_FFN.items()}),
    ),
    derived=derived,
    rope=no_rope,
)
