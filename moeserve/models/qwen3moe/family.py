"""Qwen3-MoE (Qwen3 technical report, https://arxiv.org/abs/2505.09388): q and k normalised per head; no shared
expert. The published models renormalise the chosen experts' weights and have experts in every layer, no biases and
no windows; other models of the family may differ in each of these."""

from __future__ import annotations

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import MoeShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.layer_settings import derived_by, sparse_layers, windows
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    OUTPUT_BIAS,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    reader.only("expert_shared_count", 0)
    attention = AttentionShape(
        *reader.heads(), qk_norm="head", qkv_bias=reader.qkv_bias(), output_bias=reader.output_bias()
    )
    router = RouterOptions(scoring="softmax", normalize=reader.flag("expert_weights_norm", default=True))
    moe = MoeShape(*reader.experts(), router)
    return reader.model(
        tuple(
            LayerShape(seen, ffn)
            for seen, ffn in zip(reader.windowed(attention), reader.feed_forwards(moe), strict=True)
        )
    )


FAMILY = ModelFamily(
    architecture="qwen3moe",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="qwen3_moe",
        keys=DECODER_KEYS
        | MOE_KEYS
        | {"expert_weights_norm": ("norm_topk_prob",), n.HAS_QKV_BIAS: ("attention_bias",)},
        defaults={"expert_weights_norm": False, n.HAS_QKV_BIAS: False},
        # setting: (the only supported value, transformers' default)
        fixed={
            "hidden_act": ("silu", "silu"),
            "partial_rotary_factor": (1.0, 1.0),
        },
        layer=DECODER_LAYER | DECODER_QK_NORMS | DECODER_BIASES | OUTPUT_BIAS,
        moe=MOE_ROUTER,
        dense=DENSE_FFN,
        experts=MOE_EXPERTS,
        optional=frozenset(DECODER_BIASES | OUTPUT_BIAS),
        derived=derived_by(sparse_layers, windows(None)),
    ),
)
