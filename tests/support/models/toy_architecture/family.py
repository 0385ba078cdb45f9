"""ToyMoE: norms of all heads of q or k as one, no biases, weights that are scaled instead of renormalised, and a shared
expert without a gate. No architecture in the registry has any of these four together."""

from __future__ import annotations

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Raises ModelError."""
    reader = ShapeReader(source)
    reader.only("leading_dense_block_count", 0)
    attention = AttentionShape(*reader.heads(), qk_norm="full")
    shared = SharedExpert(reader.integer("expert_shared_feed_forward_length", 1, 1 << 16), is_gated=False)
    router = RouterOptions(normalize=False, scale=reader.number("expert_weights_scale", 0.01, 100.0))
    layer = LayerShape(attention, MoeShape(*reader.experts(), router, shared))
    return reader.model((layer,) * reader.num_layers)


FAMILY = ModelFamily(architecture="toymoe", read_shape=read_shape)
