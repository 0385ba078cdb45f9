"""MiMo-V2-Flash (https://huggingface.co/XiaomiMiMo/MiMo-V2-Flash).

Values are narrower than keys and multiplied by a constant. Sliding-window layers have more KV heads, their own RoPE
base and attention sinks. DeepSeek-V3's router without a shared expert. Further layers in the file predict further
tokens (MTP) and are not loaded.
"""

from __future__ import annotations

from moeserve.models.attention import AttentionShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.mimo2.hugging_face import FOLDER
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError. The tensors tell which layers have sinks and which have
    no experts."""
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

    return reader.model(tuple(LayerShape(attention(index), ffn) for index, ffn in enumerate(mixtures)))


FAMILY = ModelFamily(architecture="mimo2", read_shape=read_shape, hugging_face=FOLDER)
