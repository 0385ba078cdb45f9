"""DeepSeekMoE 16B (https://arxiv.org/abs/2401.06066), which llama.cpp calls deepseek.

Attention is Llama's. The first layers have no experts; the others have a softmax router and ungated shared experts. No
key of a GGUF says whether experts' weights are normalised: they are not.
"""

from __future__ import annotations

from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.llama_experts import llama_with_experts
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    SHARED_EXPERTS,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported
    setting."""
    reader = ShapeReader(source)
    attention, moe = llama_with_experts(reader)
    return reader.model(tuple(LayerShape(attention, ffn) for ffn in reader.feed_forwards(moe)))


FAMILY = ModelFamily(
    architecture="deepseek",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="deepseek",
        keys=DECODER_KEYS
        | MOE_KEYS
        | {
            "expert_count": ("n_routed_experts",),
            "expert_shared_count": ("n_shared_experts",),
            "expert_weights_norm": ("norm_topk_prob",),
            "feed_forward_length": ("intermediate_size",),
            "leading_dense_block_count": ("first_k_dense_replace",),
        },
        defaults={"expert_weights_norm": False},
        # setting: (the only supported value, the default)
        fixed={
            "hidden_act": ("silu", "silu"),
            "attention_bias": (False, False),
            "moe_layer_freq": (1, 1),
            "scoring_func": ("softmax", "softmax"),
        },
        layer=DECODER_LAYER,
        moe=MOE_ROUTER | SHARED_EXPERTS,
        dense=DENSE_FFN,
        experts=MOE_EXPERTS,
        optional=frozenset(SHARED_EXPERTS),
        metadata={n.ROPE_HALVES: True},
        rope_theta=10000.0,
    ),
)
