"""Settings of tiny models of Hugging Face's model classes, by family."""

from __future__ import annotations

from typing import Any

from tests.support.models.dense_families import DENSE_FAMILIES

VOCAB_ROWS = 4128  # of the embedding: 32 more than there are tokens, as in the published models
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB_ROWS,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # large enough for distributions with a shape
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "eos_token_id": [4089, 4087],
}

# Of families beyond the Qwens' mixtures: names of the config and of the model, and what it has beside or in place of
# SETTINGS.
ROPE = {"rope_theta": 1e6, "rope_type": "default"}
YARN = {"rope_theta": 150000.0, "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096}  # fmt: skip
RECURRENT: dict[str, Any] = {
    "head_dim": 64, "shared_expert_intermediate_size": 160, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64, "num_hidden_layers": 4,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "intermediate_size": 224, "n_routed_experts": 8, "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 64, "intermediate_size": 192}),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            "head_dim": 64, "intermediate_size": 224, "n_routed_experts": 8, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "attention_bias": True, "use_qk_norm": True,
            "n_group": 4, "topk_group": 2, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "solar_open": (
        "SolarOpenConfig",
        "SolarOpenForCausalLM",
        {
            "head_dim": 64, "n_routed_experts": 8, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
            "rope_parameters": YARN | {"rope_theta": 1e6, "factor": 2.0, "original_max_position_embeddings": 256},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        LATENT
        | {
            "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        LATENT
        | {
            "num_hidden_layers": 4, "num_local_experts": 8, "head_dim": 64, "layer_group_size": 2, "n_group": 4,
            "topk_group": 2, "first_k_dense_replace": 1, "pad_token_id": 0, "eos_token_id": 1, "rope_theta": 6e6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 6e6},
        },
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "intermediate_size": 300, "block_multiple_of": 32, "layer_types": ["conv", "full_attention", "conv"],
            "bos_token_id": 1, "pad_token_id": 0,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 64, "intermediate_size": 192, "sliding_window": 17, "query_pre_attn_scalar": 100,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": ROPE | {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "sarvam_moe": (
        "SarvamMoEConfig",
        "Glm4MoeForCausalLM",
        {
            "head_dim": 64, "intermediate_size": 224, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4,
            "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        LATENT
        | {
            "q_lora_rank": None, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 2, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        LATENT | {"qk_nope_head_dim": 96, "n_group": 1, "topk_group": 1, "rope_parameters": ROPE},
    ),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "intermediate_size": 192, "attention_bias": True,
            "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"intermediate_size": 192, "sliding_window": 16}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"intermediate_size": 96, "num_local_experts": 8, "sliding_window": None},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"intermediate_size": 192}),
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        RECURRENT
        | {
            "intermediate_size": 160,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5]},
        },
    ),
    "hy_v3": (
        "HYV3Config",
        "HYV3ForCausalLM",
        {
            "head_dim": 64, "intermediate_size": 224, "num_shared_experts": 1, "router_scaling_factor": 2.8,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "dots1": (
        "Dots1Config",
        "Dots1ForCausalLM",
        {
            "head_dim": 64, "intermediate_size": 224, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
        },
    ),
    "afmoe": (
        "AfmoeConfig",
        "AfmoeForCausalLM",
        {
            "head_dim": 64, "intermediate_size": 224, "num_shared_experts": 2, "num_dense_layers": 1,
            "route_scale": 1.5, "global_attn_every_n_layers": 3, "sliding_window": 16, "mup_enabled": True,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
            "head_dim": 32, "intermediate_size": 224, "ssm_state_size": 32, "mamba_num_heads": 4, "mamba_head_dim": 64,
            "n_groups": 2, "conv_kernel": 4, "chunk_size": 16, "n_routed_experts": 8, "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 160, "routed_scaling_factor": 1.5,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "intermediate_size": 96,
            "shared_intermediate_size": 160, "num_local_experts": 8, "mamba_n_heads": 4, "mamba_d_head": 64,
            "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_chunk_size": 16,
            "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
            "attention_multiplier": 0.0625, "position_embedding_type": "nope",
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {
            "intermediate_size": 224, "num_dense_layers": 1, "conv_L_cache": 3, "routed_scaling_factor": 1.5,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        {
            "num_key_value_heads": 1, "head_dim": 96, "v_head_dim": 64, "intermediate_size": 224, "sliding_window": 17,
            "n_routed_experts": 8, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
            },
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        "HunYuanMoEV1ForCausalLM",
        {
            "head_dim": 64, "intermediate_size": 96, "moe_topk": 2,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {"intermediate_size": 96}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            "intermediate_size": 224, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        "ExaoneMoeForCausalLM",
        {
            "head_dim": 64, "intermediate_size": 224, "num_shared_experts": 1, "first_k_dense_replace": 1,
            "sliding_window": 16, "sliding_window_pattern": 3, "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {
            "intermediate_size": 96, "num_local_experts": 8, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
            "residual_multiplier": 0.5, "attention_multiplier": 0.0625,
        },
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        "GraniteMoeSWAForCausalLM",
        {
            "intermediate_size": 96, "num_local_experts": 8, "shared_intermediate_size": 64, "sliding_window": 17,
            "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
            "attention_multiplier": 0.0625, "layer_rope_theta": [1e4, 0, 1e6],
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {
            "head_dim": 64, "intermediate_size": 96, "num_local_experts": 8,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", RECURRENT),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        RECURRENT | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5]}},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 64, "intermediate_size": 96, "num_local_experts": 8, "sliding_window": 16,
            "layer_types": None, "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "intermediate_size": 160, "sliding_window": 16, "enable_moe_block": True, "top_k_experts": 2,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "rope_parameters": None,
        },
    ),
    "mellum": (
        "MellumConfig",
        "MellumForCausalLM",
        {
            "head_dim": 64, "intermediate_size": 192, "sliding_window": 17, "pad_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "rope_parameters": {
                "full_attention": YARN | {"original_max_position_embeddings": 64, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    **DENSE_FAMILIES,
}  # fmt: skip

# Families that choose keys: where two scores are nearly equal, rounding decides, so that few positions are exact.
INDEXED: dict[str, Any] = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 64}
INDEXED_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v32": (
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        LATENT
        | INDEXED
        | {
            "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        LATENT
        | INDEXED
        | {
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_parameters": ROPE,
            "indexer_types": ["full", "shared", "full"],
        },
    ),
}  # fmt: skip
