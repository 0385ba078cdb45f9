"""DeepSeek-V4 and V4-Flash (https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash): attention to a window and to
compressed entries, a residual of several streams that are mixed, and in the first layers experts by token id.

`attention.compress_ratios` gives each layer's number of tokens per entry. 0 means the window only. 4 means overlapping
entries, of which an indexer chooses some. With other numbers, queries attend to all entries. Layers with entries have a
rotary base of their own, and only in them RoPE is stretched (YaRN without its magnitude). No metadata key says so; the
architecture implies it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.compressed import CompressedAttentionShape, Compressor, EntryIndexer
from moeserve.models.deepseek4.hugging_face import MAPPING
from moeserve.models.feed_forward import MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.residual import SinkhornConnections
from moeserve.models.rope_scaling import RopeScaling
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

SQRT_SOFTPLUS = 4  # llama.cpp's number of the router's scores
OVERLAPPING = 4  # tokens of an entry, of layers whose entries overlap and are chosen


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    attention = _attention(reader)
    indexer = EntryIndexer(
        num_heads=reader.integer("attention.indexer.head_count", 1, 1024),
        dim=reader.integer("attention.indexer.key_length", max(32, attention.rotary_dim), 1024),
        top=reader.integer("attention.indexer.top_k", 1, 1 << 24),
    )
    theta = reader.number("attention.compress_rope_freq_base", 2.0, 1e12)
    ratios = reader.layer_integers("attention.compress_ratios", 0, 1 << 16)
    if not any(ratios) or 1 in ratios:
        raise reader.error(
            "attention.compress_ratios", f"is {ratios}; entries of several tokens are expected"
        )
    scaling = reader.rope_scaling()
    streams = SinkhornConnections(
        count=reader.integer("hyper_connection.count", 2, 16),
        iterations=reader.integer("hyper_connection.sinkhorn_iterations", 1, 1024),
        eps=reader.number("hyper_connection.epsilon", 1e-12, 1e-2),
    )
    layers = zip(
        (_with_entries(attention, indexer, theta, r) for r in ratios), _mixtures(reader), strict=True
    )
    shape = reader.model(
        tuple(LayerShape(mixer, moe) for mixer, moe in layers), rope_scaling=_without_magnitude(scaling)
    )
    return replace(shape, streams=streams)


def _attention(reader: ShapeReader) -> CompressedAttentionShape:
    num_heads = reader.integer("attention.head_count", 1, 1024)
    reader.only("attention.head_count_kv", 1)
    head_dim = reader.integer("attention.key_length", 32, 1024)
    reader.only("attention.value_length", head_dim)
    groups = reader.integer("attention.output_group_count", 1, num_heads)
    if num_heads % groups:
        raise reader.error(
            "attention.output_group_count", f"is {groups}; it must divide the {num_heads} heads"
        )
    return CompressedAttentionShape(
        num_heads=num_heads,
        head_dim=head_dim,
        rotary_dim=reader.rotated(head_dim),
        q_rank=reader.integer("attention.q_lora_rank", 1, 1 << 16),
        window=reader.integer(n.SLIDING_WINDOW, 1, 1 << 24),
        output_groups=groups,
        output_rank=reader.integer("attention.output_lora_rank", 1, 1 << 16),
    )


def _with_entries(
    attention: CompressedAttentionShape, indexer: EntryIndexer, theta: float, ratio: int
) -> CompressedAttentionShape:
    if ratio == 0:
        return attention
    overlaps = ratio == OVERLAPPING
    return replace(
        attention,
        compressor=Compressor(ratio, attention.head_dim, overlaps),
        indexer=indexer if overlaps else None,
        rope_theta=theta,
        rope_scaled=True,
    )


def _mixtures(reader: ShapeReader) -> list[MoeShape]:
    """Returns each layer's experts; the first layers' are chosen by token id."""
    num_experts, top_k, width = reader.experts()
    reader.only("expert_gating_func", SQRT_SOFTPLUS)
    reader.only("expert_group_count", 1)
    router = RouterOptions(
        scoring="sqrt_softplus",
        normalize=reader.flag("expert_weights_norm", default=True),
        scale=reader.number("expert_weights_scale", 0.0, 1e6, default=1.0) or 1.0,
    )
    count = reader.integer("expert_shared_count", 0, 64, default=0)
    by_token = reader.integer("hash_layer_count", 0, reader.num_layers, default=0)
    routed = reader.layer_limits("swiglu_clamp_exp")
    of_shared = reader.layer_limits("swiglu_clamp_shexp") if reader.has("swiglu_clamp_shexp") else routed
    return [
        MoeShape(
            num_experts,
            top_k,
            width,
            router,
            shared=SharedExpert(
                count * width, is_gated=False, activation="clamped_silu", limit=of_shared[index] or 0.0
            )
            if count
            else None,
            choice_bias=index >= by_token,
            by_token=index < by_token,
            activation="clamped_silu",
            limit=routed[index] or 0.0,
        )
        for index in range(reader.num_layers)
    ]


def _without_magnitude(scaling: RopeScaling) -> RopeScaling:
    """Returns the scaling without YaRN's magnitude on cos and sin."""
    if scaling.type != "yarn":
        return scaling
    return replace(scaling, attn_factor=1.0 / (1.0 + 0.1 * math.log(scaling.factor)))


FAMILY = ModelFamily("deepseek4", read_shape, hugging_face=MAPPING)
