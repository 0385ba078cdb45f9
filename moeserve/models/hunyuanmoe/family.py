"""Hunyuan-A13B (https://huggingface.co/tencent/Hunyuan-A13B-Instruct): q and k are normalised per head after RoPE;
every layer has experts, chosen by a softmax, and an ungated shared expert."""

from __future__ import annotations

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
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError. RoPE scaling for long contexts needs no key: the
    converter has already applied it to the RoPE base."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), qk_norm="head", norm_after=True)
    width = reader.integer("expert_shared_feed_forward_length", 0, 1 << 16, default=0)
    reader.integer("expert_shared_count", 0, 64, default=0)  # the width covers all of them
    moe = MoeShape(
        *reader.experts(),
        RouterOptions(scoring="softmax"),
        shared=SharedExpert(width, is_gated=False) if width else None,
    )
    return reader.model((LayerShape(attention, moe),) * reader.num_layers)


FAMILY = ModelFamily(architecture="hunyuan-moe", read_shape=read_shape)
