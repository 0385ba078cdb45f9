"""Qwen2-MoE and Qwen1.5-MoE (Qwen2 technical report, https://arxiv.org/abs/2407.10671): q and k are not
normalised; a shared expert with a sigmoid gate. The published models have biases on q, k and v, experts in
every layer and no windows, and do not renormalise the chosen experts' weights; other models of the family may
differ in each of these."""

from __future__ import annotations

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import MoeShape, SharedExpert
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.layer_settings import derived_by, sparse_layers, windows
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    HuggingFaceMapping,
)
from moeserve.models.sources.source import ModelSource


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    A GGUF without `expert_weights_norm` means false."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), qk_norm="none", qkv_bias=reader.qkv_bias())
    shared = SharedExpert(reader.integer("expert_shared_feed_forward_length", 1, 1 << 16), is_gated=True)
    router = RouterOptions(scoring="softmax", normalize=reader.flag("expert_weights_norm", default=False))
    moe = MoeShape(*reader.experts(), router, shared)
    return reader.model(
        tuple(
            LayerShape(seen, ffn)
            for seen, ffn in zip(reader.windowed(attention), reader.feed_forwards(moe), strict=True)
        )
    )


FAMILY = ModelFamily(
    architecture="qwen2moe",
    read_shape=read_shape,
    hugging_face=HuggingFaceMapping(
        model_type="qwen2_moe",
        keys=DECODER_KEYS
        | MOE_KEYS
        | {
            "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
            "expert_weights_norm": ("norm_topk_prob",),
            n.HAS_QKV_BIAS: ("qkv_bias",),
        },
        defaults={"expert_weights_norm": False, n.HAS_QKV_BIAS: True},
        # setting: (the only supported value, transformers' default)
        fixed={
            "hidden_act": ("silu", "silu"),
            "partial_rotary_factor": (1.0, 1.0),
        },
        layer=DECODER_LAYER | DECODER_BIASES,
        moe=MOE_ROUTER
        | {
            n.of_part(n.FFN_GATE_SHEXP): "mlp.shared_expert.gate_proj.weight",
            n.of_part(n.FFN_UP_SHEXP): "mlp.shared_expert.up_proj.weight",
            n.of_part(n.FFN_DOWN_SHEXP): "mlp.shared_expert.down_proj.weight",
            n.of_part(n.FFN_GATE_INP_SHEXP): "mlp.shared_expert_gate.weight",
        },
        dense=DENSE_FFN,
        experts=MOE_EXPERTS,
        optional=frozenset(DECODER_BIASES),
        derived=derived_by(sparse_layers, windows(lambda layer, most: layer % 2 == 0 and layer < most)),
        flattened=frozenset({n.of_part(n.FFN_GATE_INP_SHEXP)}),  # [1, hidden] there, a vector in GGUF
    ),
)
