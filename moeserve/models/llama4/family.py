"""Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence/), Scout and Maverick, text only.

Each token has one routed expert, whose input is multiplied by the sigmoid of its router logit, and a shared expert.
Every fourth layer has no positions; the others normalise q and k per head without weights (Scout only).

Past 8,191 tokens, layers with positions attend within chunks, and the others multiply queries by a factor that
grows with the position. The blocks compute neither, so longer contexts are not served.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.interface import (
    AttentionShape,
    LayerShape,
    ModelFamily,
    ModelShape,
    MoeShape,
    SharedExpert,
)
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

PERIOD = 4  # layers, of which the last has no positions
PLAIN = 8191  # tokens
MAVERICK = 128  # experts; Maverick does not normalise q and k, which no key states


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError. The norm comes after RoPE; without weights that gives
    the same result as before it."""
    reader = ShapeReader(source)
    num_experts, top_k, width = reader.experts()
    rotated = AttentionShape(
        *reader.heads(),
        qk_norm="none" if num_experts == MAVERICK else "unweighted",
        has_rope_factors=n.ROPE_FREQS in source.tensors,
        in_pairs=True,
    )
    plain = replace(rotated, qk_norm="none", has_positions=False, has_rope_factors=False)
    router = RouterOptions(scoring="sigmoid", normalize=False)
    moe = MoeShape(
        num_experts,
        top_k,
        width,
        router,
        shared=SharedExpert(width, is_gated=False),
        weighs_input=True,
    )
    layers = [
        LayerShape(plain if (index + 1) % PERIOD == 0 else rotated, ffn)
        for index, ffn in enumerate(reader.feed_forwards(moe))
    ]
    shape = reader.model(tuple(layers))
    return replace(shape, context_length=min(shape.context_length, PLAIN))


FAMILY = ModelFamily(architecture="llama4", read_shape=read_shape)
