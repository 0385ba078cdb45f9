"""Ling 2 and Ring 2 (https://arxiv.org/abs/2510.22115), which llama.cpp calls bailingmoe2, and Sarvam
(https://huggingface.co/sarvamai/sarvam-30b), which is the same.

q and k are normalised by head; half of each head rotates, all of it in Sarvam. The first layers have no experts; the
others have DeepSeek-V3's router with groups, and an ungated shared expert. Attention's q, k and v are one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeserve.models.attention import AttentionShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.fused_qkv import fused_qkv
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DENSE_FFN,
    GROUPED_ROUTER_KEYS,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    SHARED_EXPERTS,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource

SARVAM: Final = "sarvam_moe"  # model_type


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    num_heads, num_kv_heads, head_dim = reader.heads(rotates_whole=False)
    attention = AttentionShape(
        num_heads, num_kv_heads, head_dim, qk_norm="head", rotated=reader.rotated(head_dim)
    )
    return reader.model(tuple(LayerShape(attention, ffn) for ffn in reader.sigmoid_mixtures()))


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's RoPE. Raises ModelError for a missing or unsupported setting. Where no
    setting says which part of a head rotates, Ling rotates half of it and Sarvam all."""
    if "partial_rotary_factor" not in config and config.get("rotary_dim") is None:
        config = {**config, "partial_rotary_factor": 1.0 if config.get("model_type") == SARVAM else 0.5}
    return rope_of(path, config, MAPPING)


_ATTENTION: Final = {
    n.of_part(n.ATTN_OUTPUT): "attention.dense.weight",
    n.of_part(n.ATTN_Q_NORM): "attention.query_layernorm.weight",
    n.of_part(n.ATTN_K_NORM): "attention.key_layernorm.weight",
}
MAPPING: Final = HuggingFaceMapping(
    model_type="bailing_moe",
    other_model_types=("bailing_moe_v2", SARVAM),
    keys=DECODER_KEYS
    | MOE_KEYS
    | GROUPED_ROUTER_KEYS
    | {
        "feed_forward_length": ("intermediate_size",),
        "expert_count": ("num_experts", "n_routed_experts", "num_local_experts"),
        "expert_shared_count": ("num_shared_experts", "n_shared_experts"),
        "leading_dense_block_count": ("first_k_dense_replace",),
    },
    defaults={"expert_weights_norm": True},
    # setting: (the only supported value, the default)
    fixed={
        "hidden_act": ("silu", "silu"),
        **dict.fromkeys(("use_bias", "use_qkv_bias", "attention_bias", "norm_head"), (False, False)),
        **dict.fromkeys(("use_qk_norm", "use_rmsnorm"), (True, True)),
        "score_function": ("sigmoid", "sigmoid"),
    },
    layer=_ATTENTION
    | {
        n.of_part(n.ATTN_NORM): "input_layernorm.weight",
        n.of_part(n.FFN_NORM): "post_attention_layernorm.weight",
    },
    moe=MOE_ROUTER | SHARED_EXPERTS | {n.bias_of_part(n.EXP_PROBS_B): "mlp.gate.expert_bias"},
    dense=DENSE_FFN,
    experts=MOE_EXPERTS,
    optional=frozenset(SHARED_EXPERTS) | {n.bias_of_part(n.EXP_PROBS_B)},
    made=fused_qkv("attention.query_key_value"),
    rope=rope,
    rotates_part=True,
    renamed={"model.word_embeddings.": "model.embed_tokens."},
    skipped_layers=("num_nextn_predict_layers", "num_mtp_layers"),
)

FAMILY = ModelFamily("bailingmoe2", read_shape, MAPPING)
