"""Folders of Granite 4: kinds of layers, Mamba-2's tensors, gate and up of experts as one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.expert_matrices import linear_experts_and_shared
from moeserve.models.sources.huggingface.layer_settings import FULL, layer_types
from moeserve.models.sources.huggingface.mamba2 import (
    MAMBA2_KEYS,
    check_mamba2,
    mamba2_names,
    mamba2_rules,
    mamba2_sizes,
)
from moeserve.models.sources.huggingface.mapping import DECODER_KEYS, DECODER_LAYER, HuggingFaceMapping
from moeserve.models.sources.huggingface.remade import made_by, together

ROTATES: Final = "rope.scaling.finetuned"  # llama.cpp's key for whether attention uses RoPE
ATTENTION: Final = ("attention", FULL)  # as published, and as transformers 5 writes it
KINDS: Final = ("mamba", "linear_attention", *ATTENTION)


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's `layer_types`, and the width of feed-forwards without experts. Raises
    ModelError."""
    layers, heads = config.get("num_hidden_layers"), config.get("num_key_value_heads")
    if not isinstance(layers, int) or not isinstance(heads, int):
        return {}  # invalid `layer_types` are refused by the code that reads them
    kinds = layer_types(path, config, layers, KINDS) or []
    width = config.get("intermediate_size" if config.get("num_local_experts") else "shared_intermediate_size")
    if not isinstance(width, int):
        raise SettingError(
            path, f"'intermediate_size' or 'shared_intermediate_size' is {width!r}; a number is expected"
        )
    attends = [kind in ATTENTION for kind in kinds]
    return {
        "attention.head_count_kv": np.array([heads if each else 0 for each in attends], np.int32),
        "feed_forward_length": width,
        **(
            dict.fromkeys(MAMBA2_KEYS, 0)  # config.json states them nevertheless
            if all(attends)
            else mamba2_sizes(path, config, "mamba_n_heads", "mamba_d_head")
        ),
    }


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE where attention has positions. Raises ModelError for a missing or
    unsupported setting."""
    return rope_of(path, config, MAPPING) | {ROTATES: True} if _rotates(config) else {}


def _rotates(config: Mapping[str, Any]) -> bool:
    return config.get("position_embedding_type") == "rope"


def check(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for positional encoding beside Mamba-2 (which Bamba has), and for limited time steps."""
    check_mamba2(path, config)
    kind = config.get("position_embedding_type")
    kinds = config.get("layer_types")
    has_mamba2 = not isinstance(kinds, list) or any(each not in ATTENTION for each in kinds)
    if kind not in (None, "nope", "rope") or (has_mamba2 and _rotates(config)):
        raise SettingError(path, f"'position_embedding_type' is {kind!r}; only 'nope' is supported")


_UNDER: Final = "mamba."
_ATTENTION_PARTS: Final = (n.ATTN_Q, n.ATTN_K, n.ATTN_V, n.ATTN_OUTPUT)
MIXERS: Final = {n.of_part(part): DECODER_LAYER[n.of_part(part)] for part in _ATTENTION_PARTS} | mamba2_names(
    _UNDER
)

MAPPING: Final = HuggingFaceMapping(
    model_type="granitemoehybrid",
    keys=DECODER_KEYS
    | MAMBA2_KEYS
    | {
        "expert_count": ("num_local_experts",),
        "expert_used_count": ("num_experts_per_tok",),
        "expert_shared_feed_forward_length": ("shared_intermediate_size",),
        "attention.scale": ("attention_multiplier",),
        "embedding_scale": ("embedding_multiplier",),
        "residual_scale": ("residual_multiplier",),
        "logit_scale": ("logits_scaling",),
    },
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_act": ("silu", "silu"),
        "mamba_conv_bias": (True, True),
        **dict.fromkeys(("attention_bias", "mamba_proj_bias"), (False, False)),
    },
    layer=DECODER_LAYER | MIXERS,
    moe={n.of_part(n.FFN_GATE_INP): "block_sparse_moe.router.layer.weight"},
    optional=frozenset(MIXERS),
    made=together(made_by(*mamba2_rules(_UNDER)), linear_experts_and_shared),
    derived=derived,
    rope=rope,
    rope_theta=1e4,
    check=check,
)
