"""Gemma 3 (https://arxiv.org/abs/2503.19786). Five of six layers have a window; they rotate by angles of their own,
without RoPE scaling. Norms come before and behind each block."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.gemma3dense.hugging_face import MAPPING, PERIOD, WINDOW_THETA
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.source import ModelSource

LARGEST: Final = 62  # layers of the 27B model


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    No key of a GGUF states the scale of attention's scores, which in the largest model follows the hidden size, or that
    embeddings are multiplied by sqrt(hidden)."""
    reader = ShapeReader(source)
    reader.activation("gelu_pytorch_tanh", "gelu")
    num_heads, num_kv_heads, head_dim = reader.heads()
    width = reader.hidden_size // num_heads if reader.num_layers == LARGEST else head_dim
    attention = AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        qk_norm="head",
        scale=reader.number("attention.scale", 1e-6, 1e3, default=width**-0.5),
    )
    theta = reader.number("rope.freq_base_swa", 2.0, 1e12, default=WINDOW_THETA)
    mixers = (
        replace(each, rope_theta=theta, rope_scaled=False) if each.window else each
        for each in reader.windowed(attention, PERIOD)
    )
    dense = DenseFfnShape(reader.dense_width(), activation="gelu")
    return reader.model(
        tuple(LayerShape(mixer, dense, is_sandwiched=True) for mixer in mixers),
        embedding_scale=reader.hidden_size**0.5,
        spans_see_ahead=True,
        full_layers_see_ahead=True,
    )


FAMILY = ModelFamily("gemma3", read_shape, MAPPING)
