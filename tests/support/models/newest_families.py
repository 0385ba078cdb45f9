"""Tiny random models of the families that were read from GGUF files alone at first, written by transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.models.hugging_face_model import save_random
from tests.support.models.hugging_face_settings import LATENT, ROPE, SETTINGS, YARN
from tests.support.models.rounded_kv import round_kv

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0,
               "high_freq_factor": 1.0, "original_max_position_embeddings": 64}  # fmt: skip
# Names of the config and of the model, and what it has beside or in place of SETTINGS.
NEWEST: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama4_text": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4, "head_dim": 64, "intermediate_size": 96, "intermediate_size_mlp": 224,
            "num_local_experts": 8, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "pad_token_id": 0,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "num_hidden_layers": 4, "num_key_value_heads": 4, "intermediate_size": 224, "n_shared_experts": 2,
            "num_local_experts": 8, "routed_scaling_factor": 2.446, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32, "v_head_dim": 64, "linear_head_dim": 32, "linear_num_heads": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "pad_token_id": 0, "bos_token_id": 0,
        },
    ),
    "mistral4": (
        "Mistral4Config",
        "Mistral4ForCausalLM",
        LATENT
        | {
            "n_group": 1, "topk_group": 1, "pad_token_id": 0, "bos_token_id": 0, "routed_scaling_factor": 1.5,
            "rope_parameters": {
                "type": "yarn", "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "original_max_position_embeddings": 64, "max_position_embeddings": 512,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "laguna": (
        "LagunaConfig",
        "LagunaForCausalLM",
        {
            "num_hidden_layers": 4, "head_dim": 64, "intermediate_size": 224, "shared_expert_intermediate_size": 160,
            "sliding_window": 16, "moe_routed_scaling_factor": 2.5, "gating": "per-head",
            "num_attention_heads_per_layer": [6, 4, 4, 6],
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN | {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "step3p7": (
        "Step3p7Config",
        "Step3p7ForConditionalGeneration",
        {
            "num_hidden_layers": 4, "head_dim": 64, "intermediate_size": 224, "share_expert_dim": 160,
            "n_routed_experts": 8, "sliding_window": 16, "num_sliding_attention_heads": 6,
            "moe_router_scaling_factor": 3.0,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "swiglu_limits": [None, None, 0.5, 0.5],
            "swiglu_limits_shared": [0.5, None, None, 0.5],
            "rope_parameters": {
                "full_attention": LLAMA3_ROPE | {"partial_rotary_factor": 0.5, "high_freq_factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "minimax_m3_vl": (
        "MiniMaxM3VLConfig",
        "MiniMaxM3SparseForConditionalGeneration",
        {
            "head_dim": 64, "intermediate_size": 96, "dense_intermediate_size": 224, "shared_intermediate_size": 160,
            "num_local_experts": 8, "rotary_dim": 32, "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2,
            "index_head_dim": 64, "index_block_size": 16, "index_topk_blocks": 4,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        "Cohere2MoeForCausalLM",
        {
            "num_hidden_layers": 4, "head_dim": 64, "intermediate_size": 96, "prefix_dense_intermediate_size": 224,
            "sliding_window": 16, "expert_selection_fn": "sigmoid", "norm_topk_prob": False, "logit_scale": 0.5,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "rms_norm_eps": 2**-17, "pad_token_id": 0,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        },
    ),
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "image_size": 56, "patch_size": 14}  # fmt: skip


def write_newest(
    folder: Path, model_type: str, dtype: torch.dtype = torch.bfloat16, seed: int = 7, **changes: object
) -> Any:
    """A model of one of NEWEST. Gives transformers' class of it, to be read again."""
    import transformers

    torch.manual_seed(seed)
    config_name, model_name, own = NEWEST[model_type]
    config, model = getattr(transformers, config_name), getattr(transformers, model_name)
    settings = SETTINGS | own | changes
    if "vision_config" in getattr(config, "sub_configs_defaults", {}):
        settings = {"text_config": settings, "vision_config": TOWER, "tie_word_embeddings": False}
    save_random(model(config(**settings)), folder, dtype)
    return model


def round_attended(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds to 16 bits what the KV cache holds: keys and values as attention takes them, or latent vectors."""
    module = sys.modules[type(model).__module__]
    if module.__name__.endswith("kimi_linear"):
        _round_latents(model)
        return
    if module.__name__.endswith("mistral4"):
        round_kv(model, monkeypatch)
        return
    functions: Any = module.ALL_ATTENTION_FUNCTIONS
    attend: Callable[..., Any] = functions["sdpa"]

    def rounded(
        layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        return attend(layer, query, key.half().float(), value.half().float(), *rest, **named)

    monkeypatch.setitem(functions._global_mapping, "sdpa", rounded)


def _round_latents(model: PreTrainedModel) -> None:
    """Rounds the normalised latent vector of attention without rotation, and what stands beside it."""
    rank = model.config.kv_lora_rank

    def round_rest(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[..., :rank], output[..., rank:].half().float()], -1)

    for name, each in model.named_modules():
        if name.endswith("kv_a_layernorm"):
            each.register_forward_hook(lambda module, inputs, output: output.half().float())
        elif name.endswith("kv_a_proj_with_mqa"):
            each.register_forward_hook(round_rest)
