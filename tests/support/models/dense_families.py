"""Settings of tiny models of families without experts, for `hugging_face_model.py`: names of transformers' config and
model, and what each has beside or in place of SETTINGS."""

from __future__ import annotations

from typing import Any

_FACTORS = [1.0 + 0.25 * i for i in range(32)]
DENSE_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "intermediate_size": 192, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
            "attention_multiplier": 0.0625,
        },
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        "GraniteSWAForCausalLM",
        {
            "intermediate_size": 192, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
            "attention_multiplier": 0.0625, "sliding_window": 17, "layer_rope_theta": [1e4, 1e6, 0],
            "attention_bias": True,
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {"intermediate_size": 192, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", {"intermediate_size": 192, "head_dim": 64}),
    "ministral3": (
        "Ministral3Config",
        "Ministral3ForCausalLM",
        {
            "intermediate_size": 192, "head_dim": 64, "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 256,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1, "max_position_embeddings": 512,
            },
        },
    ),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            # Past the original context, where the long list of factors is used.
            "intermediate_size": 192, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1,
            "pad_token_id": 0, "sliding_window": 17, "original_max_position_embeddings": 50,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 50, "short_factor": _FACTORS[::-1], "long_factor": _FACTORS,
            },
        },
    ),
    "cohere2": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {"intermediate_size": 192, "sliding_window": 17, "logit_scale": 0.5, "sliding_window_pattern": 3},
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1Config",
        "HunYuanDenseV1ForCausalLM",
        {
            "intermediate_size": 192, "head_dim": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"intermediate_size": 192, "pad_token_id": 0}),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {
            "intermediate_size": 192, "pad_token_id": 0, "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64,
                    "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.3,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "exaone4": (
        "Exaone4Config",
        "Exaone4ForCausalLM",
        {
            "intermediate_size": 192, "sliding_window": 17, "head_dim": 64,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        },
    ),
    "glm4": (
        "Glm4Config",
        "Glm4ForCausalLM",
        {
            "intermediate_size": 192, "head_dim": 64, "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "intermediate_size": 192, "head_dim": 64, "sliding_window": 17, "query_pre_attn_scalar": 100,
            "attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0, "tie_word_embeddings": True,
            "bos_token_id": 1, "pad_token_id": 0,
        },
    ),
    "granitemoehybrid, without Mamba-2": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["full_attention"] * 3, "intermediate_size": 96, "shared_intermediate_size": 160,
            "num_local_experts": 0, "num_experts_per_tok": 0, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
            "residual_multiplier": 0.5, "attention_multiplier": 0.0625, "position_embedding_type": "rope",
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            # Multipliers that change no type's precision.
            "head_dim": 64, "intermediate_size": 192, "mamba_d_ssm": 192, "mamba_n_heads": 6, "mamba_d_head": 32,
            "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_chunk_size": 16, "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.7, "key_multiplier": 0.5, "attention_in_multiplier": 2.0,
            "attention_out_multiplier": 0.5, "ssm_in_multiplier": 0.5, "ssm_out_multiplier": 2.0,
            "ssm_multipliers": [0.5, 2.0, 0.25, 2.0, 0.5], "mlp_multipliers": [2.0, 0.5], "pad_token_id": 0,
        },
    ),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {"intermediate_size": 192, "head_dim": 64}),
}  # fmt: skip
