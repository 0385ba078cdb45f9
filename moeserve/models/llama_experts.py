"""Reads the layers of DeepSeekMoE and Ling 1: Llama's attention, a softmax router and ungated shared experts."""

from __future__ import annotations

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import MoeShape, SharedExpert
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n


def llama_with_experts(reader: ShapeReader) -> tuple[AttentionShape, MoeShape]:
    """Returns attention and experts, which are the same in all layers that have them. Raises ModelError for a missing
    or unsupported setting."""
    attention = AttentionShape(
        *reader.heads(), qk_norm="none", in_pairs=not reader.flag(n.ROPE_HALVES, default=False)
    )
    num_experts, top_k, width = reader.experts()
    count = reader.integer("expert_shared_count", 0, 64, default=0)
    router = RouterOptions(
        scoring="softmax",
        normalize=reader.flag("expert_weights_norm", default=False),
        scale=reader.number("expert_weights_scale", 0.0, 1e6, default=0.0) or 1.0,
    )
    shared = SharedExpert(count * width, is_gated=False) if count else None
    return attention, MoeShape(num_experts, top_k, width, router, shared)
