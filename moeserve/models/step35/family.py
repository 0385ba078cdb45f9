"""Step-3.5-Flash and Step-3.7 (https://huggingface.co/stepfun-ai/Step-3.5-Flash), text only.

Sliding-window layers have more heads and rotate them whole; the others rotate half. A gate multiplies each head's
output. The experts' activation is clamped in the last layers. DeepSeek-V3's router. Further layers in the file
predict further tokens (MTP); the first of them drafts.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.attention import AttentionShape
from moeserve.models.clamped_ffns import clamped, clamped_next_token
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.next_token_layers import layer_with_parts
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource
from moeserve.models.step35.hugging_face import MAPPING


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    The architecture implies how much of a head rotates in layers without a window; no key states it."""
    reader = ShapeReader(source)
    head_dim = reader.integer("attention.key_length", 4, 1024)
    reader.only("attention.value_length", head_dim)
    whole = reader.rotated(head_dim)
    sees_window, heads = reader.flags(n.WINDOWED_LAYERS), reader.layer_heads()

    def attention(index: int) -> AttentionShape:
        windowed = sees_window[index]
        return AttentionShape(
            *heads[index],
            head_dim,
            qk_norm="head",
            rotated=whole if windowed else whole // 2,
            window=reader.integer(n.SLIDING_WINDOW, 1, 1 << 24) if windowed else 0,
            rope_theta=reader.number("rope.freq_base_swa", 2.0, 1e12) if windowed else None,
            has_rope_factors=not windowed and n.ROPE_FREQS in source.tensors,
            gate="head",
        )

    layers = [
        LayerShape(attention(index), ffn)
        for index, ffn in enumerate(clamped(reader, reader.sigmoid_mixtures(normalize=True)))
    ]
    return replace(reader.model(tuple(layers)), drafts_before_norm=True)


def next_token_layer(source: ModelSource, _layer: LayerShape) -> LayerShape:
    """Returns the layer of the first next-token block, which has a window unless the file says otherwise. Raises
    ModelError."""
    reader = ShapeReader(source)
    has_window = reader.next_token_has_window() is not False
    layer = layer_with_parts(source, read_shape(source).layers, has_window=has_window)
    return clamped_next_token(reader, layer)


FAMILY = ModelFamily(
    "step35", read_shape, MAPPING, has_next_token_block=True, next_token_layer=next_token_layer
)
