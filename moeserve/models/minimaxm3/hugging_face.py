"""Folders of MiniMax-M3's text model. Published folders have the indexer's settings in an object of their own; folders
written by transformers have them at the top level."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import FULL, integer, layer_flags
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    HuggingFaceMapping,
)

SPARSE: Final = "minimax_m3_sparse"  # in `layer_types`, a layer with an indexer
_SPARSE_SETTINGS: Final = {  # GGUF's key -> the names in `sparse_attention_config` and outside it
    "attention.indexer.head_count": ("sparse_num_index_heads", "index_n_heads"),
    "attention.indexer.key_length": ("sparse_index_dim", "index_head_dim"),
    "attention.indexer.block_size": ("sparse_block_size", "index_block_size"),
    "attention.indexer.top_k": ("sparse_topk_blocks", "index_topk_blocks"),
    "attention.indexer.local_blocks": ("sparse_local_block", "index_local_blocks"),
}
_FIXED: Final = {  # setting of `sparse_attention_config`: the only supported value
    "sparse_score_type": "max",
    "sparse_init_block": 0,
}
_ACTIVATIONS: Final = (None, "swigluoai", "silu")  # transformers computes "swigluoai" for "silu" as well


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, which layers have experts, and the indexer, from config.json. Raises ModelError for
    a missing or unsupported setting."""
    layers = integer(path, config, "num_hidden_layers")
    is_dense = layer_flags(path, config, layers, "mlp_layer_types", ("sparse", "dense"))
    if is_dense is None:
        has_experts = layer_flags(path, config, layers, "moe_layer_freq", (0, 1))
        is_dense = [not each for each in has_experts or [True] * layers]
    return {n.DENSE_LAYERS: np.array(is_dense), **_indexer(path, config, layers, is_dense)}


def _indexer(
    path: Path, config: Mapping[str, Any], layers: int, is_dense: list[bool]
) -> dict[str, MetadataValue]:
    sparse = config.get("sparse_attention_config") or {}
    if not isinstance(sparse, dict):
        raise SettingError(path, f"'sparse_attention_config' is {sparse!r:.80}; an object is expected")
    for name, supported in _FIXED.items():
        if sparse.get(name, supported) != supported:
            raise SettingError(path, f"{name!r} is {sparse[name]!r:.40}; only {supported!r} is supported")
    chooses = layer_flags(path, config, layers, "layer_types", (FULL, SPARSE))
    if chooses is None:
        chooses = layer_flags(path, sparse, layers, "sparse_attention_freq", (0, 1)) or [False] * layers
    without_values = layer_flags(path, sparse, layers, "sparse_disable_index_value", (0, 1))
    if without_values is not None and any(
        each and not without for each, without in zip(chooses, without_values, strict=True)
    ):
        raise SettingError(
            path, "'sparse_disable_index_value' is 0 for a layer with an indexer; only 1 is supported"
        )
    if chooses != [not dense for dense in is_dense]:
        raise SettingError(
            path,
            "the layers with an indexer ('layer_types') are not those with experts ('mlp_layer_types'); only "
            "then are they supported",
        )
    return {
        ours: integer(path, sparse if inside in sparse else config, inside if inside in sparse else outside)
        for ours, (inside, outside) in _SPARSE_SETTINGS.items()
    }


def check(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for settings that would be computed wrongly."""
    activation = config.get("hidden_act")
    if activation not in _ACTIVATIONS:
        raise SettingError(path, f"'hidden_act' is {activation!r:.40}; only 'swigluoai' is supported")


_UNDER: Final = "block_sparse_moe."
_INDEXER: Final = {ours: f"self_attn.index_{ours.removeprefix('indexer.')}" for ours in n.BLOCK_INDEXER}
MAPPING: Final = HuggingFaceMapping(
    model_type="minimax_m3_vl_text",
    other_model_types=("minimax_m3", "minimax_m3_text"),
    wrapped_in="minimax_m3_vl",
    keys=DECODER_KEYS
    | {
        "feed_forward_length": ("dense_intermediate_size",),
        "expert_count": ("num_local_experts", "num_experts"),
        "expert_used_count": ("num_experts_per_tok",),
        "expert_feed_forward_length": ("intermediate_size",),
        "expert_shared_feed_forward_length": ("shared_intermediate_size",),
        "expert_weights_scale": ("routed_scaling_factor",),
    },
    # setting: (the only supported value, transformers' default)
    fixed={
        "n_shared_experts": (1, 1),
        "scoring_func": ("sigmoid", "sigmoid"),
        "swiglu_alpha": (1.702, 1.702),
        "swiglu_limit": (7.0, 7.0),
        "qk_norm_type": ("per_head", "per_head"),
        "use_qk_norm": (True, True),
        "use_gemma_norm": (True, True),
        "use_routing_bias": (True, True),
    },
    check=check,
    derived=derived,
    rotates_part=True,
    rope_theta=5e6,
    layer=DECODER_LAYER | DECODER_QK_NORMS | _INDEXER,
    moe={
        n.of_part(n.FFN_GATE_INP): f"{_UNDER}gate.weight",
        n.bias_of_part(n.EXP_PROBS_B): f"{_UNDER}e_score_correction_bias",
        n.of_part(n.FFN_GATE_SHEXP): f"{_UNDER}shared_experts.gate_proj.weight",
        n.of_part(n.FFN_UP_SHEXP): f"{_UNDER}shared_experts.up_proj.weight",
        n.of_part(n.FFN_DOWN_SHEXP): f"{_UNDER}shared_experts.down_proj.weight",
    },
    dense=DENSE_FFN,
    experts={
        n.of_part(n.FFN_GATE_EXPS): "w1.weight",
        n.of_part(n.FFN_UP_EXPS): "w3.weight",
        n.of_part(n.FFN_DOWN_EXPS): "w2.weight",
    },
    experts_under=f"{_UNDER}experts",
    optional=frozenset(_INDEXER),
    less_one=frozenset(
        {n.OUTPUT_NORM, *map(n.of_part, (n.ATTN_NORM, n.FFN_NORM, n.ATTN_Q_NORM, n.ATTN_K_NORM))}
    )
    | frozenset(name for name in n.BLOCK_INDEXER if "norm" in name),
    skipped=("mtp.", "model.mtp."),
)
