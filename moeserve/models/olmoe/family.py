"""OLMoE (https://arxiv.org/abs/2409.02060): q and k normalised over all heads at once; no shared expert; the chosen
experts' weights are not normalised."""

from __future__ import annotations

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import MoeShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    OUTPUT_BIAS,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    In a GGUF, a missing `expert_weights_norm` means false, and the key for a dense layer's width holds an expert's."""
    reader = ShapeReader(source)
    attention = AttentionShape(
        *reader.heads(), qk_norm="full", qkv_bias=reader.qkv_bias(), output_bias=reader.output_bias()
    )
    router = RouterOptions(scoring="softmax", normalize=reader.flag("expert_weights_norm", default=False))
    moe = MoeShape(*reader.experts("feed_forward_length"), router)
    return reader.model((LayerShape(attention, moe),) * reader.num_layers)


FAMILY = ModelFamily(
    architecture="olmoe",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="olmoe",
        keys=DECODER_KEYS
        | {
            "expert_count": MOE_KEYS["expert_count"],
            "expert_used_count": MOE_KEYS["expert_used_count"],
            "feed_forward_length": ("intermediate_size",),
            "expert_weights_norm": ("norm_topk_prob",),
            n.HAS_QKV_BIAS: ("attention_bias",),
        },
        defaults={"expert_weights_norm": False, n.HAS_QKV_BIAS: False},
        # setting: (the only supported value, transformers' default)
        fixed={"hidden_act": ("silu", "silu"), "clip_qkv": (None, None)},
        layer=DECODER_LAYER | DECODER_QK_NORMS | DECODER_BIASES | OUTPUT_BIAS,
        moe=MOE_ROUTER,
        experts=MOE_EXPERTS,
        optional=frozenset(DECODER_BIASES | OUTPUT_BIAS),
    ),
)
