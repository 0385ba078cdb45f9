"""Hunyuan 3 (https://huggingface.co/tencent/Hy3): q and k are normalised per head. The first layers have no experts;
the others have DeepSeek-V3's router without groups, and an ungated shared expert. The last layer in the file predicts a
further token (MTP) and is loaded only if it drafts."""

from __future__ import annotations

from moeserve.models.attention import AttentionShape
from moeserve.models.interface import LayerShape, ModelFamily, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.layer_settings import leading_dense_layers
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DECODER_QK_NORMS,
    DENSE_FFN,
    MOE_EXPERTS,
    MOE_KEYS,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.next_token_names import WITH_FINAL_NORM
from moeserve.models.sources.source import ModelSource

SHARED = {
    n.of_part(n.FFN_GATE_SHEXP): "mlp.shared_mlp.gate_proj.weight",
    n.of_part(n.FFN_UP_SHEXP): "mlp.shared_mlp.up_proj.weight",
    n.of_part(n.FFN_DOWN_SHEXP): "mlp.shared_mlp.down_proj.weight",
}


def read_shape(source: ModelSource) -> ModelShape:
    """Returns the model's shape, read from the file's metadata. Raises ModelError for a missing or unsupported setting.
    In a GGUF file only the tensors tell which layers are dense."""
    reader = ShapeReader(source)
    attention = AttentionShape(*reader.heads(), qk_norm="head")
    return reader.model(tuple(LayerShape(attention, ffn) for ffn in reader.sigmoid_mixtures()))


FAMILY = ModelFamily(
    architecture="hy_v3",
    read_shape=read_shape,
    has_next_token_block=True,
    hugging_face=HuggingFaceMapping(
        model_type="hy_v3",
        keys=DECODER_KEYS
        | MOE_KEYS
        | {
            "feed_forward_length": ("intermediate_size",),
            "expert_shared_count": ("num_shared_experts",),
            "expert_weights_norm": ("route_norm",),
            "expert_weights_scale": ("router_scaling_factor",),
        },
        defaults={"expert_weights_norm": True},
        # setting: (the only supported value, transformers' default)
        fixed={"hidden_act": ("silu", "silu"), "attention_bias": (False, False), "mlp_bias": (False, False)},
        layer=DECODER_LAYER | DECODER_QK_NORMS,
        moe=SHARED
        | {
            n.of_part(n.FFN_GATE_INP): "mlp.router.gate.weight",
            n.bias_of_part(n.EXP_PROBS_B): "mlp.expert_bias",
        },
        dense=DENSE_FFN,
        experts=MOE_EXPERTS,
        optional=frozenset(SHARED),
        derived=leading_dense_layers,
        next_token=WITH_FINAL_NORM,
        skipped_layers=("num_nextn_predict_layers",),
    ),
)
