"""How to read folders of DeepSeek-V2, V3, Kimi-K2 and K2.5, and GLM-4.7-Flash: config.json and tensor names."""

from __future__ import annotations

from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.latent import KEYS as LATENT_KEYS
from moeserve.models.sources.huggingface.latent import V2, derived, made_tensors
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DENSE_FFN,
    GROUPED_ROUTER_KEYS,
    HEAD_DIM,
    MOE_EXPERTS,
    MOE_KEYS,
    MOE_ROUTER,
    OUTPUT_BIAS,
    SHARED_EXPERTS,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.next_token_names import BEHIND_LAYERS

_KEYS = {
    ours: theirs for ours, theirs in DECODER_KEYS.items() if ours not in (HEAD_DIM, "attention.head_count_kv")
}

ATTENTION = {
    n.of_part(n.ATTN_NORM): "input_layernorm.weight",
    n.of_part(n.ATTN_KV_A_MQA): "self_attn.kv_a_proj_with_mqa.weight",
    n.of_part(n.ATTN_KV_A_NORM): "self_attn.kv_a_layernorm.weight",
    n.of_part(n.ATTN_OUTPUT): "self_attn.o_proj.weight",
    n.of_part(n.FFN_NORM): "post_attention_layernorm.weight",
}
QUERIES = {  # a layer has either the first matrix or the other three
    n.of_part(n.ATTN_Q): "self_attn.q_proj.weight",
    n.of_part(n.ATTN_Q_A): "self_attn.q_a_proj.weight",
    n.of_part(n.ATTN_Q_A_NORM): "self_attn.q_a_layernorm.weight",
    n.of_part(n.ATTN_Q_B): "self_attn.q_b_proj.weight",
}
BIASES = OUTPUT_BIAS | {
    n.bias_of_part(n.ATTN_Q_A): "self_attn.q_a_proj.bias",
    n.bias_of_part(n.ATTN_KV_A_MQA): "self_attn.kv_a_proj_with_mqa.bias",
}
CHOICE_BIAS = n.bias_of_part(n.EXP_PROBS_B)

MAPPING = HuggingFaceMapping(
    model_type="deepseek_v3",
    other_model_types=(V2, "kimi_k2", "glm4_moe_lite"),
    wrapped_in="kimi_k25",  # the published form, with vision
    keys=_KEYS
    | MOE_KEYS
    | GROUPED_ROUTER_KEYS
    | {
        "feed_forward_length": ("intermediate_size",),
        **LATENT_KEYS,
        "rope.dimension_count": ("qk_rope_head_dim",),
        "expert_count": ("n_routed_experts", "num_experts", "num_local_experts"),
        "expert_shared_count": ("n_shared_experts",),
        "leading_dense_block_count": ("first_k_dense_replace",),
        n.HAS_QKV_BIAS: ("attention_bias",),
    },
    defaults={n.HAS_QKV_BIAS: False},
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_act": ("silu", "silu"),
        "rope_interleave": (True, True),
        "moe_layer_freq": (1, 1),
    },
    layer=ATTENTION | QUERIES | BIASES,
    moe=MOE_ROUTER | SHARED_EXPERTS | {CHOICE_BIAS: "mlp.gate.e_score_correction_bias"},
    dense=DENSE_FFN,
    experts=MOE_EXPERTS,
    optional=frozenset(QUERIES | BIASES | SHARED_EXPERTS) | {CHOICE_BIAS},
    made=made_tensors,
    derived=derived,
    rope_settings=frozenset({"mscale", "mscale_all_dim"}),
    next_token=BEHIND_LAYERS,
    skipped_layers=("num_nextn_predict_layers", "num_mtp_layers"),
)
