"""dots.llm1 (https://arxiv.org/abs/2506.05767): q and k are normalised per head. The first layers have no experts; the
others have DeepSeek-V3's router and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import SettingError
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.layer_settings import FULL, SLIDING
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    GROUPED_ROUTER_KEYS,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    OUTPUT_BIAS,
    SHARED_EXPERTS,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    attention = AttentionShape(
        *reader.heads(), qk_norm="head", qkv_bias=reader.qkv_bias(), output_bias=reader.output_bias()
    )
    return reader.model(tuple(LayerShape(attention, ffn) for ffn in reader.sigmoid_mixtures()))


def no_windows(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError if `layer_types` has a sliding window. (`sliding_window` alone does not mean that a layer has
    one.)"""
    types = config.get("layer_types") or []
    if not isinstance(types, list) or SLIDING in types:
        raise SettingError(path, f"'layer_types' is {types!r:.80}; only {FULL!r} is supported")


FAMILY = ModelFamily(
    architecture="dots1",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="dots1",
        keys=DECODER_KEYS
        | MOE_KEYS
        | GROUPED_ROUTER_KEYS
        | {
            "feed_forward_length": ("intermediate_size",),
            "expert_count": ("n_routed_experts", "num_experts", "num_local_experts"),
            "expert_shared_count": ("n_shared_experts",),
            "leading_dense_block_count": ("first_k_dense_replace",),
            n.HAS_QKV_BIAS: ("attention_bias",),
        },
        defaults={n.HAS_QKV_BIAS: False},
        # setting: (the only supported value, transformers' default)
        fixed={"hidden_act": ("silu", "silu")},
        check=no_windows,
        layer=DECODER_LAYER | DECODER_QK_NORMS | DECODER_BIASES | OUTPUT_BIAS,
        moe=MOE_ROUTER | SHARED_EXPERTS | {n.bias_of_part(n.EXP_PROBS_B): "mlp.gate.e_score_correction_bias"},
        dense=DENSE_FFN,
        experts=MOE_EXPERTS,
        optional=frozenset(DECODER_BIASES | OUTPUT_BIAS | SHARED_EXPERTS),
    ),
)
