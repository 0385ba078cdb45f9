"""How to read folders of Gemma 4, with experts, dense and small: config.json and tensor names, of the published
multimodal checkpoints (vision and sound are left out) and of text-only ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import integer, windows_of
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    HEAD_DIM,
    MOE_EXPERTS,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.proportional_rope import FULL, SLIDING, rope, rope_factors

LAYER_INPUTS: Final = "hidden_size_per_layer_input"
UNIFIED: Final = "gemma4_unified_text"
# transformers' defaults; a unified model has no such inputs.
INPUT_WIDTHS: Final = {UNIFIED: 0}
OTHER_INPUT_WIDTH: Final = 256
EXPERT_KEYS: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
PERIOD = 6  # layers; without `layer_types`, the last of them has full attention
_KEYS = {
    ours: theirs for ours, theirs in DECODER_KEYS.items() if ours not in (HEAD_DIM, "attention.head_count_kv")
}


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the settings that differ between layers with a window and layers without one, from
    config.json. Raises ModelError for a missing or unsupported setting."""
    if config.get("use_bidirectional_attention") == "all":
        raise SettingError(path, "'use_bidirectional_attention' is 'all', which is not supported")
    types = _layer_types(path, config)
    full_dim, kv_heads = _heads(path, config, types)
    from_keys = config.get("attention_k_eq_v") is True
    default = INPUT_WIDTHS.get(str(config.get("model_type")), OTHER_INPUT_WIDTH)
    input_width = integer(path, config, LAYER_INPUTS, default, low=0)
    values = windows_of(types) | {
        "attention.key_length": full_dim,
        "attention.head_count_kv": np.array(kv_heads, np.int64),
        n.VALUES_FROM_KEYS: np.array([from_keys and each == FULL for each in types]),
        n.SPANS_SEE_AHEAD: config.get("use_bidirectional_attention") == "vision",
        "feed_forward_length": np.array(_widths(path, config, len(types)), np.int64),
        "attention.shared_kv_layers": _shared_layers(path, config, len(types)),
        "embedding_length_per_layer_input": input_width,
    }
    has_experts = config.get("enable_moe_block") is True
    if has_experts:
        values |= {ours: integer(path, config, theirs) for ours, theirs in EXPERT_KEYS.items()}
    return values | {n.DENSE_LAYERS: np.array([not has_experts] * len(types))}


def _shared_layers(path: Path, config: Mapping[str, Any], layers: int) -> int:
    """Returns the number of last layers that use the keys and values of earlier ones."""
    shared = integer(path, config, "num_kv_shared_layers", 0, low=0)
    if shared >= layers:
        raise SettingError(
            path, f"'num_kv_shared_layers' is {shared}; only fewer than {layers} layers are supported"
        )
    return shared


def _widths(path: Path, config: Mapping[str, Any], layers: int) -> list[int]:
    """Returns the width of each layer's feed-forward. `use_double_wide_mlp` doubles those of layers that share keys."""
    width = integer(path, config, "intermediate_size")
    own = layers - _shared_layers(path, config, layers)
    doubled = config.get("use_double_wide_mlp") is True
    if doubled and config.get("enable_moe_block") is True and own < layers:
        raise SettingError(path, "'use_double_wide_mlp' is true beside experts, which is not supported")
    return [width * (2 if doubled and layer >= own else 1) for layer in range(layers)]


def _layer_types(path: Path, config: Mapping[str, Any]) -> list[str]:
    layers, types = config.get("num_hidden_layers"), config.get("layer_types")
    if not isinstance(layers, int) or not 1 <= layers <= 1024:
        raise SettingError(path, f"'num_hidden_layers' is {layers!r}; 1 to 1024 is supported")
    if types is None:
        types = [FULL if (index + 1) % PERIOD == 0 else SLIDING for index in range(layers)]
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(each in (SLIDING, FULL) for each in types)
    ):
        raise SettingError(path, f"'layer_types' is {types!r}; {SLIDING} or {FULL} of each layer is expected")
    return [*types[:-1], FULL]  # transformers gives the last layer full attention


def _heads(path: Path, config: Mapping[str, Any], types: list[str]) -> tuple[int, list[int]]:
    """Returns the head size of full-attention layers, and each layer's number of KV heads. Published files have
    separate settings for such layers; transformers 5.23 writes per-layer settings."""
    base = {name: config.get(name) for name in ("head_dim", "num_key_value_heads")}
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        of_full = {"head_dim": config.get("global_head_dim") or 512}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
            of_full["num_key_value_heads"] = config["num_global_key_value_heads"]
        by_layer = {str(index): of_full for index, each in enumerate(types) if each == FULL}
    known = {str(index) for index in range(len(types))}
    if not isinstance(by_layer, dict) or not all(
        index in known and isinstance(changes, dict) and changes.keys() <= base.keys()
        for index, changes in by_layer.items()
    ):
        raise SettingError(
            path, f"'per_layer_config' is {by_layer!r}; only {' and '.join(base)} by layer are supported"
        )
    layers = [base | by_layer.get(str(index), {}) for index in range(len(types))]
    if not all(isinstance(value, int) and value > 0 for layer in layers for value in layer.values()):
        raise SettingError(path, f"{' or '.join(map(repr, base))} is missing, or not a whole number")
    dims = {
        kind: {layer["head_dim"] for layer, each in zip(layers, types, strict=True) if each == kind}
        for kind in (SLIDING, FULL)
    }
    if len(dims[FULL]) > 1 or not dims[SLIDING] <= {base["head_dim"]}:
        raise SettingError(path, "'per_layer_config' has heads of several widths in layers of one type")
    return dims[FULL].pop(), [layer["num_key_value_heads"] for layer in layers]


LAYER = (
    {name: theirs for name, theirs in DECODER_LAYER.items() if name != n.of_part(n.FFN_NORM)}
    | DECODER_QK_NORMS
    | DENSE_FFN
    | {
        n.of_part(n.POST_ATTENTION_NORM): "post_attention_layernorm.weight",
        n.of_part(n.FFN_NORM): "pre_feedforward_layernorm.weight",
        n.of_part(n.POST_FFW_NORM): "post_feedforward_layernorm.weight",
        n.of_part(n.POST_FFW_NORM_1): "post_feedforward_layernorm_1.weight",
        n.of_part(n.PRE_FFW_NORM_2): "pre_feedforward_layernorm_2.weight",
        n.of_part(n.POST_FFW_NORM_2): "post_feedforward_layernorm_2.weight",
        n.of_part(n.LAYER_OUTPUT_SCALE): "layer_scalar",
        n.of_part(n.LAYER_INPUT_GATE): "per_layer_input_gate.weight",
        n.of_part(n.LAYER_INPUT_PROJ): "per_layer_projection.weight",
        n.of_part(n.LAYER_INPUT_NORM): "post_per_layer_input_norm.weight",
    }
)
OUTSIDE: Final = {
    n.LAYER_INPUT_EMBD: "model.embed_tokens_per_layer.weight",
    n.LAYER_INPUT_MODEL_PROJ: "model.per_layer_model_projection.weight",
    n.LAYER_INPUT_PROJ_NORM: "model.per_layer_projection_norm.weight",
}
# Parts that some layers or models lack: the shape says which ones need them.
SOME_LAYERS: Final = frozenset(
    map(
        n.of_part,
        (
            *(n.ATTN_K, n.ATTN_V, n.ATTN_K_NORM, n.POST_FFW_NORM_1, n.PRE_FFW_NORM_2, n.POST_FFW_NORM_2),
            *(n.LAYER_INPUT_GATE, n.LAYER_INPUT_PROJ, n.LAYER_INPUT_NORM),
        ),
    )
)

MAPPING = HuggingFaceMapping(
    model_type="gemma4_text",
    other_model_types=(UNIFIED,),
    wrapped_in="gemma4",
    other_wrappers=("gemma4_unified",),
    keys=_KEYS
    | {
        "attention.key_length_swa": ("head_dim",),
        "attention.sliding_window": ("sliding_window",),
        "final_logit_softcapping": ("final_logit_softcapping",),
    },
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh", "gelu_pytorch_tanh"),
        "attention_bias": (False, False),
    },
    layer=LAYER,
    moe={
        n.of_part(n.FFN_GATE_INP): "router.proj.weight",
        n.scale_of_part(n.FFN_GATE_INP): "router.scale",
        n.scale_of_part(n.FFN_DOWN_EXPS): "router.per_expert_scale",
    },
    experts=MOE_EXPERTS,
    experts_under="experts",
    optional=SOME_LAYERS | OUTSIDE.keys(),
    outside=OUTSIDE,
    derived=derived,
    rope=rope,
    made_of_none=rope_factors,
    tied_by_default=True,
)
