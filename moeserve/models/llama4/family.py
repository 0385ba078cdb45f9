"""Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence/), Scout and Maverick, text only.

Each token has one routed expert, whose input is multiplied by the sigmoid of its router logit, and a shared expert.
Every fourth layer has no positions; the others normalise q and k per head without weights (Scout only).

Past 8,191 tokens, layers with positions attend within chunks, and the others multiply queries by a factor that
grows with the position. moeserve computes neither, so longer contexts are not served.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.llama4.hugging_face import MAPPING, PERIOD
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

PLAIN = 8191  # tokens
# Maverick has this number of experts, by which it is recognised: it does not normalise q and k, and no key says so.
MAVERICK = 128


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    The norm comes after RoPE; without weights that gives the same result as before it."""
    reader = ShapeReader(source)
    num_experts, top_k, width = reader.experts()
    rotated = AttentionShape(
        *reader.heads(),
        qk_norm="unweighted" if reader.flag(n.HAS_QK_NORM, default=num_experts != MAVERICK) else "none",
        has_rope_factors=n.ROPE_FREQS in source.tensors,
        in_pairs=True,
    )
    plain = replace(rotated, qk_norm="none", has_positions=False, has_rope_factors=False)
    reader.only("expert_gating_func", 2)  # llama.cpp's number for the sigmoid
    if reader.flag("expert_weights_norm", default=False):
        raise reader.error(
            "expert_weights_norm", "is true; only scores that are not normalised are supported"
        )
    router = RouterOptions(scoring="sigmoid", normalize=False)
    moe = MoeShape(
        num_experts,
        top_k,
        width,
        router,
        shared=SharedExpert(width, is_gated=False),
        weighs_input=True,
    )
    unrotated = reader.optional_flags(n.UNROTATED_LAYERS) or [
        (index + 1) % PERIOD == 0 for index in range(reader.num_layers)
    ]
    layers = [
        LayerShape(plain if without else rotated, ffn)
        for without, ffn in zip(unrotated, reader.feed_forwards(moe), strict=True)
    ]
    shape = reader.model(tuple(layers))
    return replace(shape, context_length=min(shape.context_length, PLAIN))


FAMILY = ModelFamily(architecture="llama4", read_shape=read_shape, hugging_face=MAPPING)
