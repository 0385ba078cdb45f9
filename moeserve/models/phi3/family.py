"""Phi-3 and Phi-4 (https://arxiv.org/abs/2404.14219, https://arxiv.org/abs/2412.08905): no experts; q, k and v are one
tensor, gate and up another. Models for long contexts divide RoPE's frequencies by one of two lists of factors
(LongRoPE, https://arxiv.org/abs/2402.13753)."""

from __future__ import annotations

from typing import Final

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.phi3.hugging_face import MAPPING
from moeserve.models.rope_scaling import RopeScaling
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

NO_WINDOW: Final = 1 << 18  # positions: published files say "no window" with this window


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    All layers have the window that the key states, as in transformers; llama.cpp does not compute it."""
    reader = ShapeReader(source)
    num_heads, num_kv_heads, head_dim = reader.heads(rotates_whole=False)
    scaling = _scaling(reader, source)
    window = reader.integer(n.SLIDING_WINDOW, 0, 1 << 24, default=0)
    attention = AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        rotated=reader.rotated(head_dim),
        window=0 if window >= NO_WINDOW else window,
        has_rope_factors=scaling.type == "longrope",
    )
    layer = LayerShape(attention, DenseFfnShape(reader.dense_width()))
    return reader.model((layer,) * reader.num_layers, rope_scaling=scaling)


def _scaling(reader: ShapeReader, source: ModelSource) -> RopeScaling:
    if n.LONG_ROPE_FACTORS not in source.tensors:
        return reader.rope_scaling()
    for setting in ("rope.scaling.factor", "rope.scale_linear"):
        if reader.number(setting, 0.0, 1024.0, default=1.0) not in (0.0, 1.0):
            raise reader.error(setting, f"is given, and the file has the tensor {n.LONG_ROPE_FACTORS!r}")
    return RopeScaling(
        "longrope",
        original_context_length=reader.integer("rope.scaling.original_context_length", 1, 1 << 24),
        attn_factor=reader.number("rope.scaling.attn_factor", 1e-3, 1e3, default=1.0),
    )


FAMILY = ModelFamily(architecture="phi3", read_shape=read_shape, hugging_face=MAPPING)
