"""GLM-4-9B-0414, GLM-4-32B-0414 and GLM-Z1 (https://huggingface.co/zai-org/GLM-4-32B-0414): no experts; norms before
and behind each block; half of each head rotates, in pairs of neighbours; gate and up are one tensor."""

from __future__ import annotations

from typing import Final

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.fused_rows import fused_gate_up
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource

THETA: Final = 1e4  # transformers' default


def read_shape(source: ModelSource) -> ModelShape:
    """Reads the shape from the metadata. Raises ModelError. The tensors of a GGUF say whether q, k and v have biases:
    they have in the smaller model."""
    reader = ShapeReader(source)
    num_heads, num_kv_heads, head_dim = reader.heads(rotates_whole=False)
    attention = AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias=reader.qkv_bias(),
        rotated=reader.rotated(head_dim),
        in_pairs=True,
    )
    layer = LayerShape(attention, DenseFfnShape(reader.dense_width()), is_sandwiched=True)
    return reader.model((layer,) * reader.num_layers)


FAMILY = ModelFamily(
    architecture="glm4",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="glm4",
        keys=DECODER_KEYS
        | {"feed_forward_length": ("intermediate_size",), n.HAS_QKV_BIAS: ("attention_bias",)},
        defaults={n.HAS_QKV_BIAS: True},
        fixed={"hidden_act": ("silu", "silu")},  # setting: (the only supported value, transformers' default)
        layer=DECODER_LAYER
        | DECODER_BIASES
        | {
            n.of_part(n.POST_ATTENTION_NORM): "post_self_attn_layernorm.weight",
            n.of_part(n.FFN_DOWN): DENSE_FFN[n.of_part(n.FFN_DOWN)],
            n.of_part(n.POST_FFW_NORM): "post_mlp_layernorm.weight",
        },
        optional=frozenset(DECODER_BIASES),
        made=fused_gate_up("mlp.gate_up_proj"),
        rotates_part=True,
        rope_theta=THETA,
    ),
)
