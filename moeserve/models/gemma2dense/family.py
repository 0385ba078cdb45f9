"""Gemma 2 (https://arxiv.org/abs/2408.00118): every other layer has a window; scores of attention and logits are
capped. Norms come before and behind each block."""

from __future__ import annotations

from typing import Final

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.gemma2dense.hugging_face import LOGIT_CAP, MAPPING, PERIOD, SCORE_CAP, THETA, WINDOW
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.source import ModelSource

LARGEST: Final = 46  # layers of the 27B model


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
        scale=reader.number("attention.scale", 1e-6, 1e3, default=width**-0.5),
        score_cap=reader.number("attn_logit_softcapping", 0.0, 1e6, default=SCORE_CAP),
    )
    dense = DenseFfnShape(reader.dense_width(), activation="gelu")
    mixers = reader.windowed(attention, PERIOD, WINDOW)
    return reader.model(
        tuple(LayerShape(mixer, dense, is_sandwiched=True) for mixer in mixers),
        embedding_scale=reader.hidden_size**0.5,
        logit_softcap=reader.number("final_logit_softcapping", 0.0, 1e6, default=LOGIT_CAP),
        rope_theta=THETA,
    )


FAMILY = ModelFamily("gemma2", read_shape, MAPPING)
