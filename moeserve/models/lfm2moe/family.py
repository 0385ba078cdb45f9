"""LFM2 and LFM2.5 with experts (https://huggingface.co/LiquidAI/LFM2-8B-A1B): gated short convolutions in most layers,
grouped-query attention in the others. The first layers have no experts; the others have DeepSeek-V3's router, without
groups and without a shared expert. The head is the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.attention import AttentionShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.recurrent_heads import short_conv_shape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.short_conv import ShortConvShape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import FULL, layer_types
from moeserve.models.sources.huggingface.mapping import DECODER_KEYS, MOE_KEYS, HuggingFaceMapping
from moeserve.models.sources.huggingface.remade import convolution, made_by
from moeserve.models.sources.source import ModelSource

KV_HEADS = "attention.head_count_kv"
CONV = "conv"  # the kind of a layer with a short convolution


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    No key of a GGUF states that expert weights are normalised."""
    reader = ShapeReader(source)
    ffns = reader.sigmoid_mixtures(normalize=True)
    return reader.model(
        tuple(LayerShape(mixer, ffn) for mixer, ffn in zip(mixers(reader), ffns, strict=True))
    )


def mixers(reader: ShapeReader) -> list[AttentionShape | ShortConvShape]:
    """Returns each layer's mixer: a short convolution if the metadata gives it no KV heads, else attention. Raises
    ModelError for a missing or unsupported setting."""
    kv_heads = reader.layer_integers(KV_HEADS, 0, 1024)
    if not any(kv_heads):
        raise reader.error(KV_HEADS, "has no layer that attends, which is not supported")
    conv = short_conv_shape(reader)
    return [
        AttentionShape(*reader.heads(num_kv_heads=num_kv), qk_norm="head") if num_kv else conv
        for num_kv in kv_heads
    ]


def kv_heads_by_layer(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, the number of KV heads of each layer, 0 for layers with a convolution, from
    `layer_types`, or from `full_attn_idxs` of older checkpoints. Raises ModelError for a missing or unsupported
    setting."""
    layers, heads = config.get("num_hidden_layers"), config.get("num_key_value_heads")
    if not isinstance(layers, int) or not isinstance(heads, int):
        return {}  # invalid `layer_types` are refused by the code that reads them
    attending = config.get("full_attn_idxs")
    if config.get("layer_types") is None and isinstance(attending, list):
        kinds = [FULL if layer in attending else CONV for layer in range(layers)]
    else:
        kinds = layer_types(path, config, layers, (CONV, FULL)) or [FULL] * layers
    return {KV_HEADS: np.array([heads if kind == FULL else 0 for kind in kinds], np.int32)}


MIXERS = {
    n.of_part(n.ATTN_Q): "self_attn.q_proj.weight",
    n.of_part(n.ATTN_K): "self_attn.k_proj.weight",
    n.of_part(n.ATTN_V): "self_attn.v_proj.weight",
    n.of_part(n.ATTN_OUTPUT): "self_attn.out_proj.weight",
    n.of_part(n.ATTN_Q_NORM): "self_attn.q_layernorm.weight",
    n.of_part(n.ATTN_K_NORM): "self_attn.k_layernorm.weight",
    n.of_part(n.SHORT_CONV_IN): "conv.in_proj.weight",
    n.of_part(n.SHORT_CONV_OUT): "conv.out_proj.weight",
}
CHOICE_BIAS = {n.bias_of_part(n.EXP_PROBS_B): "feed_forward.expert_bias"}

FAMILY = ModelFamily(
    architecture="lfm2moe",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="lfm2_moe",
        keys=DECODER_KEYS
        | MOE_KEYS
        | {
            "attention.layer_norm_rms_epsilon": ("norm_eps",),
            "feed_forward_length": ("intermediate_size",),
            "leading_dense_block_count": ("num_dense_layers",),
            "shortconv.l_cache": ("conv_L_cache",),
            "expert_weights_norm": ("norm_topk_prob",),
            "expert_weights_scale": ("routed_scaling_factor",),
        },
        # setting: (the only supported value, transformers' default)
        fixed={"conv_bias": (False, False)},
        renamed={"model.embedding_norm.": "model.norm."},
        layer=MIXERS
        | {n.of_part(n.ATTN_NORM): "operator_norm.weight", n.of_part(n.FFN_NORM): "ffn_norm.weight"},
        moe=CHOICE_BIAS | {n.of_part(n.FFN_GATE_INP): "feed_forward.gate.weight"},
        dense={
            n.of_part(n.FFN_GATE): "feed_forward.w1.weight",
            n.of_part(n.FFN_UP): "feed_forward.w3.weight",
            n.of_part(n.FFN_DOWN): "feed_forward.w2.weight",
        },
        experts={
            n.of_part(n.FFN_GATE_EXPS): "w1.weight",
            n.of_part(n.FFN_UP_EXPS): "w3.weight",
            n.of_part(n.FFN_DOWN_EXPS): "w2.weight",
        },
        experts_under="feed_forward.experts",
        optional=frozenset(MIXERS | CHOICE_BIAS),
        made=made_by(convolution(n.of_part(n.SHORT_CONV), "conv.conv.weight")),
        derived=kv_heads_by_layer,
        tied_by_default=True,
        rope_theta=1e6,
    ),
)
