"""MiMo-V2-Flash's and MiMo-V2.5's folders. Published folders have separate settings, with names of their own, for
layers with a window; folders written by transformers have lists by layer or objects by kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import (
    FULL,
    SLIDING,
    layer_flags,
    layer_types,
    number,
)
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.next_token_names import MIMO
from moeserve.models.sources.huggingface.ranked_qkv import ranked_qkv

PERIOD = 6  # without a setting, the first layer and the last of every period of this many layers have full attention
ROTATED = 0.334  # rotated part of a head if no setting says so
QKV = "self_attn.qkv_proj"  # in MiMo-V2.5
LAYOUTS = (None, "split", "fused_qkv")


def by_layer(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the settings that differ between layers or may be null. Raises
    ModelError."""
    layers = number(path, config, "num_hidden_layers", 1, 1024)
    has_window = _windowed(path, config, int(layers))
    is_dense = layer_flags(path, config, int(layers), "mlp_layer_types", ("sparse", "dense"))
    if is_dense is None:
        has_experts = layer_flags(path, config, int(layers), "moe_layer_freq", (0, 1))
        is_dense = [not each for each in has_experts or [False, *[True] * (int(layers) - 1)]]
    heads = int(number(path, config, "num_key_value_heads", 1, 1024))
    own = int(number(path, config, "swa_num_key_value_heads", 1, 1024, default=2 * heads))
    for name, same in _SAME:
        if config.get(name) is not None and config[name] != config.get(same):
            raise SettingError(
                path,
                f"{name!r} is {config[name]!r:.80} and {same!r} {config.get(same)!r:.80}; "
                "only equal ones are supported",
            )
    layout = config.get("attention_projection_layout")
    if layout not in LAYOUTS:
        raise SettingError(
            path, f"'attention_projection_layout' is {layout!r:.80}; split and fused_qkv are supported"
        )
    # "sliding_window_size" does not count the token's own key; "sliding_window" does.
    before = config.get("sliding_window_size")
    window = number(path, config, "sliding_window", 1, 1 << 24) if before is None else (
        number(path, config, "sliding_window_size", 1, 1 << 24) + 1
    )  # fmt: skip
    return {
        n.WINDOWED_LAYERS: np.array(has_window),
        n.DENSE_LAYERS: np.array(is_dense),
        n.SLIDING_WINDOW: int(window),
        "attention.head_count_kv": np.array([own if each else heads for each in has_window], np.int32),
        "attention.value_scale": number(path, config, "attention_value_scale", 1e-3, 1e3, default=1.0),
        "expert_weights_scale": number(path, config, "routed_scaling_factor", 1e-6, 1e6, default=1.0),
    }


_SAME = (
    ("swa_num_attention_heads", "num_attention_heads"),
    ("swa_head_dim", "head_dim"),
    ("swa_v_head_dim", "v_head_dim"),
)


def _windowed(path: Path, config: Mapping[str, Any], layers: int) -> list[bool]:
    types = layer_types(path, config, layers)
    if types is not None:
        return [each == SLIDING for each in types]
    pattern = layer_flags(path, config, layers, "hybrid_layer_pattern", (0, 1))
    return pattern or [layer != 0 and (layer + 1) % PERIOD != 0 for layer in range(layers)]


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, RoPE's settings of each kind of layer. All must rotate the same part of a head,
    unscaled. Raises ModelError for a missing or unsupported setting."""
    given = config.get("rope_parameters")
    factor = config.get("partial_rotary_factor") or ROTATED
    bases = [config.get("rope_theta"), config.get("swa_rope_theta")]
    scaling = config.get("rope_scaling")
    if isinstance(given, dict) and isinstance(bases[0], int | float) and given.get("rope_theta") == bases[0]:
        # MiMo-V2.5's, which say once more what the settings of the layers without a window say
        scaling, factor = given, given.get("partial_rotary_factor") or factor
    elif given is not None:
        of_kinds = [given.get(kind) for kind in (FULL, SLIDING)] if isinstance(given, dict) else []
        kinds = [kind for kind in of_kinds if isinstance(kind, dict)]
        if len(kinds) != 2:
            raise SettingError(
                path, f"'rope_parameters' is {given!r:.80}; those of {FULL} and {SLIDING} are expected"
            )
        bases = [kind.get("rope_theta") for kind in kinds]
        factors = {kind.get("partial_rotary_factor") or factor for kind in kinds}
        scaling = next((kind for kind in kinds if kind.get("rope_type", "default") != "default"), None)
        if len(factors) != 1:
            raise SettingError(
                path, "'partial_rotary_factor' differs between layers; only one for all layers is supported"
            )
        (factor,) = factors
    if scaling is not None and scaling.get("rope_type", scaling.get("type")) != "default":
        raise SettingError(path, f"RoPE is scaled by {scaling!r:.80}; only unscaled RoPE is supported")
    head_dim = number(path, config, "head_dim", 2, 1024)
    factor = number(path, {"partial_rotary_factor": factor}, "partial_rotary_factor", 0.001, 1)
    full, windowed = (
        float(number(path, {name: base}, name, 2, 1e12))
        for name, base in zip(("rope_theta", "swa_rope_theta"), bases, strict=True)
    )
    return {
        "rope.freq_base": full,
        "rope.freq_base_swa": windowed,
        "rope.dimension_count": int(head_dim * factor),
    }


FOLDER = HuggingFaceMapping(
    model_type="mimo_v2_flash",
    keys=DECODER_KEYS
    | MOE_KEYS
    | {
        n.RMS_EPS: ("rms_norm_eps", "layernorm_epsilon"),
        "expert_count": ("n_routed_experts", "num_experts", "num_local_experts"),
        "expert_group_count": ("n_group",),
        "expert_group_used_count": ("topk_group",),
        "expert_weights_norm": ("norm_topk_prob",),
        "feed_forward_length": ("intermediate_size",),
        "attention.value_length": ("v_head_dim",),
    },
    defaults={n.RMS_EPS: 1e-5},
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_act": ("silu", "silu"),
        "attention_bias": (False, False),
        "scoring_func": ("sigmoid", "sigmoid"),
        "n_shared_experts": (None, None),
        "add_swa_attention_sink_bias": (True, True),
        "add_full_attention_sink_bias": (False, False),
    },
    derived=by_layer,
    rope=rope,
    layer=DECODER_LAYER | {n.of_part(n.ATTN_SINKS): "self_attn.attention_sink_bias"},
    moe=MOE_ROUTER | {n.bias_of_part(n.EXP_PROBS_B): "mlp.gate.e_score_correction_bias"},
    dense=DENSE_FFN,
    experts=MOE_EXPERTS,
    optional=frozenset({n.of_part(n.ATTN_SINKS)}),
    made=ranked_qkv(QKV),
    ranked_qkv=QKV,
    left_out=("visual.", "audio_encoder.", "speech_embeddings."),
    other_model_types=("mimo_v2",),
    next_token=MIMO,
    skipped=("model.mtp.",),
)
