"""Folders of Laguna: settings that differ between layers are lists, and RoPE has an object for each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.layer_settings import (
    SLIDING,
    integer,
    layer_types,
    leading_dense_layers,
    number,
)
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.rope_by_kind import check_unscaled, rope_by_kind

PER_HEAD: Final = (True, "per-head", "per_head")


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the settings that differ between layers. Raises ModelError for a missing or
    unsupported setting."""
    layers = integer(path, config, "num_hidden_layers")
    heads = (
        config.get("num_attention_heads_per_layer") or [integer(path, config, "num_attention_heads")] * layers
    )
    if (
        not isinstance(heads, list)
        or len(heads) != layers
        or not all(isinstance(each, int) for each in heads)
    ):
        raise SettingError(
            path,
            f"'num_attention_heads_per_layer' is {heads!r:.80}; a number for each of {layers} layers is expected",
        )
    gates = config.get("gating_types") or [config.get("gating", True)]
    if not isinstance(gates, list) or any(gate not in PER_HEAD for gate in gates):
        raise SettingError(
            path, f"'gating' is {gates!r:.80}; only one gate for each head ('per-head') is supported"
        )
    types = layer_types(path, config, layers) or []
    is_windowed = [each == SLIDING for each in types] or [False] * layers
    values: dict[str, MetadataValue] = {
        "attention.head_count": np.array(heads, np.int64),
        n.WINDOWED_LAYERS: np.array(is_windowed),
        **leading_dense_layers(path, config),
    }
    if any(is_windowed):
        values[n.SLIDING_WINDOW] = integer(path, config, "sliding_window")
    return values


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE by kind of layer; only full-attention layers may have scaled
    RoPE. Raises ModelError for a missing or unsupported setting."""
    full, windowed = rope_by_kind(path, config)
    values = rope_of(path, {**config, "rope_parameters": {"partial_rotary_factor": 1.0, **full}}, MAPPING)
    if windowed:
        check_unscaled(path, windowed, SLIDING)
        head_dim = integer(path, config, "head_dim")
        share = number(path, windowed, "partial_rotary_factor", 0.001, 1, default=1.0)
        values |= {
            "rope.freq_base_swa": number(path, windowed, "rope_theta", 2, 1e12),
            "rope.dimension_count_swa": int(head_dim * share),
        }
    return values


MAPPING: Final = HuggingFaceMapping(
    model_type="laguna",
    keys={ours: theirs for ours, theirs in DECODER_KEYS.items() if ours != "attention.head_count"}
    | MOE_KEYS
    | {
        "feed_forward_length": ("intermediate_size",),
        "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
        "expert_weights_scale": ("moe_routed_scaling_factor",),
    },
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_act": ("silu", "silu"),
        "attention_bias": (False, False),
        "norm_topk_prob": (True, True),
        "moe_apply_router_weight_on_input": (False, False),
        "moe_router_logit_softcapping": (0, 0),
    },
    derived=derived,
    rope=rope,
    rotates_part=True,
    layer=DECODER_LAYER | DECODER_QK_NORMS | {n.of_part(n.ATTN_GATE): "self_attn.g_proj.weight"},
    moe=MOE_ROUTER
    | {
        n.bias_of_part(n.EXP_PROBS_B): "mlp.experts.e_score_correction_bias",
        n.of_part(n.FFN_GATE_SHEXP): "mlp.shared_expert.gate_proj.weight",
        n.of_part(n.FFN_UP_SHEXP): "mlp.shared_expert.up_proj.weight",
        n.of_part(n.FFN_DOWN_SHEXP): "mlp.shared_expert.down_proj.weight",
    },
    dense=DENSE_FFN,
    experts=MOE_EXPERTS,
)
