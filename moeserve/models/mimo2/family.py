"""MiMo-V2-Flash (https://huggingface.co/XiaomiMiMo/MiMo-V2-Flash), and the text of MiMo-V2.5 and V2.5-Pro.

Values are narrower than keys and multiplied by a constant. Sliding-window layers have more KV heads, their own RoPE
base and attention sinks. The router is DeepSeek-V3's; there is no shared expert. Further layers in the file predict
further tokens (MTP); the first of them drafts.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.attention import AttentionShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.mimo2.hugging_face import FOLDER
from moeserve.models.next_token_layers import layer_with_parts
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    The tensors tell which layers have sinks and which have no experts."""
    reader = ShapeReader(source)
    head_dim = reader.integer("attention.key_length", 2, 1024)
    sees_window, heads = reader.flags(n.WINDOWED_LAYERS), reader.layer_heads()
    mixtures = reader.sigmoid_mixtures(normalize=True)

    def attention(index: int) -> AttentionShape:
        return AttentionShape(
            *heads[index],
            head_dim,
            qkv_bias=reader.qkv_bias(),
            rotated=reader.rotated(head_dim),
            window=reader.integer(n.SLIDING_WINDOW, 1, 1 << 24) if sees_window[index] else 0,
            has_sinks=n.of_layer(index, n.ATTN_SINKS) in source.tensors,
            value_dim=reader.integer("attention.value_length", 2, head_dim),
            v_scale=reader.number("attention.value_scale", 1e-3, 1e3, default=1.0),
            rope_theta=reader.number("rope.freq_base_swa", 2.0, 1e12) if sees_window[index] else None,
        )

    shape = reader.model(tuple(LayerShape(attention(index), ffn) for index, ffn in enumerate(mixtures)))
    # Files have the next-token block's last norm under the one name or the other.
    is_output_norm = n.of_layer(shape.num_layers, n.LAYER_OUTPUT_NORM) in source.tensors
    return replace(shape, next_token_norm=n.LAYER_OUTPUT_NORM) if is_output_norm else shape


def next_token_layer(source: ModelSource, _layer: LayerShape) -> LayerShape:
    """Returns the layer of the first next-token block, which has a window and no experts. Raises ModelError for a
    missing or unsupported setting."""
    shape = read_shape(source)
    layer = layer_with_parts(source, shape.layers, has_window=True)
    assert isinstance(layer.mixer, AttentionShape)
    has_sinks = n.of_layer(shape.num_layers, n.ATTN_SINKS) in source.tensors
    return replace(layer, mixer=replace(layer.mixer, has_sinks=has_sinks))


FAMILY = ModelFamily(
    "mimo2", read_shape, FOLDER, has_next_token_block=True, next_token_layer=next_token_layer
)
