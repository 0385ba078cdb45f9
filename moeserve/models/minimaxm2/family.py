"""MiniMax-M2 and M2.5: the router scores by sigmoid and has a choice bias; there is no shared expert. q and k are
normalised over all heads at once. A part of each head rotates."""

from __future__ import annotations

from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import MoeShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    MOE_KEYS,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    The chosen experts' weights are normalised unless a key says otherwise; llama.cpp's converter writes none."""
    reader = ShapeReader(source)
    for absent in ("expert_shared_count", "leading_dense_block_count"):
        reader.only(absent, 0)
    num_heads, num_kv_heads, head_dim = reader.heads(rotates_whole=False)
    attention = AttentionShape(
        num_heads, num_kv_heads, head_dim, qk_norm="full", rotated=reader.rotated(head_dim)
    )
    num_experts, top_k, width = reader.experts()
    router = reader.sigmoid_router(num_experts, top_k, normalize=True)
    layer = LayerShape(attention, MoeShape(num_experts, top_k, width, router, choice_bias=True))
    return reader.model((layer,) * reader.num_layers)


FAMILY = ModelFamily(
    architecture="minimax-m2",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="minimax_m2",
        keys=DECODER_KEYS | MOE_KEYS | {"expert_feed_forward_length": ("intermediate_size",)},
        # setting: (the only supported value, transformers' default)
        fixed={
            "hidden_act": ("silu", "silu"),
            "scoring_func": ("sigmoid", "sigmoid"),
            "use_qk_norm": (True, True),
            "qk_norm_type": ("per_layer", "per_layer"),
        },
        layer=DECODER_LAYER | DECODER_QK_NORMS,
        moe={
            n.of_part(n.FFN_GATE_INP): "block_sparse_moe.gate.weight",
            n.bias_of_part(n.EXP_PROBS_B): "block_sparse_moe.e_score_correction_bias",
        },
        experts={
            n.of_part(n.FFN_GATE_EXPS): "w1.weight",
            n.of_part(n.FFN_UP_EXPS): "w3.weight",
            n.of_part(n.FFN_DOWN_EXPS): "w2.weight",
        },
        experts_under="block_sparse_moe.experts",
        rotates_part=True,
    ),
)
