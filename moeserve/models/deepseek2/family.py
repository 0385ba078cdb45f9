"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434), V3 and R1 (https://arxiv.org/abs/2412.19437), Kimi-K2 and
GLM-4.7-Flash: models with latent attention. The first layers have no experts; the others have a router that chooses
experts within groups, and shared experts.

A GGUF describes attention in absorbed form: one KV head, whose key has the latent and the rotated dimensions and whose
value the latent ones. Metadata keys ending in `_mla` have the checkpoint's head sizes. The up-projection of k is
transposed per head. Older files have both up-projections in one matrix and are refused.
"""

from __future__ import annotations

import math
from dataclasses import replace

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.deepseek2.hugging_face import MAPPING
from moeserve.models.errors import ModelError
from moeserve.models.feed_forward import DenseFfnShape, MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.latent_heads import latent_attention
from moeserve.models.rope_scaling import RopeScaling
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.latent import SIGMOID, SOFTMAX
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError, also for an older file whose up-projections are one
    matrix."""
    reader = ShapeReader(source)
    if n.of_layer(0, n.ATTN_KV_B) in source.tensors:
        raise ModelError(
            source.path,
            f"tensor {n.of_layer(0, n.ATTN_KV_B)!r} is of a file that was converted before latent attention had "
            "tensors of its own (attn_k_b, attn_v_b), which is not supported; convert the model again",
        )
    scaling = reader.rope_scaling()
    attention = _attention(reader, scaling)
    num_dense = reader.integer("leading_dense_block_count", 0, reader.num_layers, default=0)
    dense = DenseFfnShape(reader.dense_width()) if num_dense else None
    # A configuration may describe experts that no layer has.
    has_experts = num_dense < reader.num_layers or reader.has("expert_count")
    moe = _experts(reader, source, num_dense) if has_experts else None
    layers = tuple(
        LayerShape(attention, ffn)
        for index in range(reader.num_layers)
        if (ffn := dense if index < num_dense else moe) is not None
    )
    return reader.model(layers, rope_scaling=_without_magnitude(scaling))


def _attention(reader: ShapeReader, scaling: RopeScaling) -> LatentAttentionShape:
    num_heads = reader.integer("attention.head_count", 1, 1024)
    reader.only("attention.head_count_kv", 1)
    attention = latent_attention(reader, num_heads)
    reader.only("attention.value_length", attention.rank)
    reader.number("rope.scaling.attn_factor", 1.0, 1.0, default=1.0)
    if scaling.type == "yarn" and scaling.attn_factor not in (1.0, _plain_attn_factor(scaling)):
        raise reader.error(
            "rope.scaling.yarn_attn_factor", f"is {scaling.attn_factor}; only 1.0 is supported"
        )
    return replace(
        attention,
        scale=_magnitude(reader, scaling) ** 2 * attention.scale,
        input_bias=reader.qkv_bias(n.ATTN_KV_A_MQA),
        output_bias=reader.output_bias(),
    )


def _magnitude(reader: ShapeReader, scaling: RopeScaling) -> float:
    """Returns the factor by which YaRN multiplies q and k, to sharpen the softmax of long contexts. The metadata key
    holds 0.1 * mscale_all_dim."""
    if scaling.type != "yarn":
        return 1.0
    return 1.0 + reader.number(n.YARN_LOG_MULTIPLIER, 0.0, 10.0, default=0.0) * math.log(scaling.factor)


def _without_magnitude(scaling: RopeScaling) -> RopeScaling:
    """Returns the scaling without YaRN's factor on cos and sin, because the scale of attention scores already includes
    it."""
    if scaling.type != "yarn":
        return scaling
    return replace(scaling, attn_factor=_plain_attn_factor(scaling))


def _plain_attn_factor(scaling: RopeScaling) -> float:
    """Returns the factor with which YaRN leaves the lengths of q and k unchanged."""
    return 1.0 / (1.0 + 0.1 * math.log(scaling.factor))


def _experts(reader: ShapeReader, source: ModelSource, first: int) -> MoeShape:
    num_experts, top_k, width = reader.experts()
    count = reader.integer("expert_shared_count", 0, 64, default=0)
    return MoeShape(
        num_experts,
        top_k,
        width,
        _router(reader, num_experts, top_k),
        shared=SharedExpert(count * width, is_gated=False) if count else None,
        choice_bias=n.bias_of_layer(first, n.EXP_PROBS_B) in source.tensors,  # V3 has one, V2 does not
    )


def _router(reader: ShapeReader, num_experts: int, top_k: int) -> RouterOptions:
    """Reads the router's options. V3 scores by sigmoid. V2 scores by softmax (its files may not say so) and ranks
    groups by their best expert."""
    if reader.integer("expert_gating_func", SOFTMAX, SIGMOID, default=SOFTMAX) == SIGMOID:
        return reader.grouped_router("sigmoid", num_experts, top_k)
    return replace(reader.grouped_router("softmax", num_experts, top_k), group_best=1)


FAMILY = ModelFamily("deepseek2", read_shape, MAPPING, has_next_token_block=True)
