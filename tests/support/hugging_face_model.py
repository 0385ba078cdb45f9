"""Tiny random models in Hugging Face's layout, written by transformers itself. Its import takes seconds, and every
process that runs tests collects all of them: the first that needs it imports it."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tests.conftest import TINY_MODEL
from tests.support.dense_families import DENSE_FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


def write_model(folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 7, **changes: object) -> None:
    """A Qwen3-MoE. Weights in several files; the packaged model's tokenizer and chat template. `changes` are the
    config's."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    settings = SETTINGS | {"head_dim": 64, "norm_topk_prob": True} | changes
    save_random(Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)), folder, dtype)


def write_qwen2_moe(
    folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 7, **changes: object
) -> None:
    """The same for Qwen2-MoE, whose heads are as wide as the hidden size makes them."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(seed)
    settings = SETTINGS | {"shared_expert_intermediate_size": 160} | changes
    save_random(Qwen2MoeForCausalLM(Qwen2MoeConfig(**settings)), folder, dtype)


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


def write_family(
    folder: Path, model_type: str, dtype: torch.dtype = torch.bfloat16, seed: int = 7, **changes: object
) -> Any:
    """A model of one of FAMILIES or INDEXED_FAMILIES. Gives transformers' class of it, to be read again."""
    import transformers

    torch.manual_seed(seed)
    config_name, model_name, own = (FAMILIES | INDEXED_FAMILIES)[model_type]
    config, model = getattr(transformers, config_name), getattr(transformers, model_name)
    save_random(model(config(**(SETTINGS | own | changes))), folder, dtype)
    return model


def write_published_qwen35(folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> Any:
    """A Qwen3.5 as it is published: with vision, experts merged. Gives transformers' class of the text's model."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration

    torch.manual_seed(seed)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
              "out_hidden_size": SETTINGS["hidden_size"]}  # fmt: skip
    own = FAMILIES["qwen3_5_moe_text"][2]
    config = Qwen3_5MoeConfig(text_config=SETTINGS | own, vision_config=vision)
    save_random(Qwen3_5MoeForConditionalGeneration(config), folder, dtype)
    merge_experts(folder)
    return Qwen3_5MoeForCausalLM


def write_published_gemma(folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> Any:
    """A Gemma 4 as it is published: with vision, and settings of the layers that see all. Gives transformers' class."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    torch.manual_seed(seed)
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 64}  # fmt: skip
    own = SETTINGS | FAMILIES["gemma4_text"][2]
    save_random(
        Gemma4ForConditionalGeneration(Gemma4Config(text_config=own, vision_config=vision)), folder, dtype
    )
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["per_layer_config"]
    config["text_config"] |= {key: own[key] for key in ("global_head_dim", "num_global_key_value_heads")}
    (folder / "config.json").write_text(json.dumps(config))
    return Gemma4ForConditionalGeneration


def write_wrapped(model: PreTrainedModel, folder: Path) -> None:
    """A model that sees as well as reads, in float32, with weights of its own."""
    save_random(model, folder, torch.float32)


def read_model(folder: Path) -> Any:
    """transformers' model of a folder, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def merge_experts(folder: Path) -> None:
    """Rewrites the weights in one file, each layer's experts as gate_up_proj and down_proj."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    for first in [name for name in tensors if name.endswith(".experts.0.gate_proj.weight")]:
        prefix = first.removesuffix("0.gate_proj.weight")
        experts = range(
            sum(name.startswith(prefix) and name.endswith("gate_proj.weight") for name in tensors)
        )
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{e}.{part}_proj.weight") for e in experts])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
    save_file(tensors, folder / "model.safetensors")


def save_random(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Norms and biases as in no fresh model, where they are 1 and 0: they must be read."""
    torch.nn.Module.to(model, dtype)  # in place; transformers' own `to` has no usable annotation
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.randn_like(parameter) - 1)
            elif "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif ".experts." in name or name.endswith(("gate.weight", "router.weight", "router.proj.weight")):
                parameter.copy_(0.15 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.9 + 0.1 * torch.rand_like(buffer))
    model.save_pretrained(folder, max_shard_size="1MB")
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)


@functools.cache
def tokenizer_files() -> dict[str, bytes]:
    """The tiny model's tokenizer as transformers writes it, read once: transformers takes 1.2 s for the GGUF."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        AutoTokenizer.from_pretrained(TINY_MODEL.parent, gguf_file=TINY_MODEL.name).save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
