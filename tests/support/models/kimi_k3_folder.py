"""The fixture of Kimi-K3 as a folder in the published form: the text model's tensors within a model that sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moeserve.models.open import open_model
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource
from moeserve.quantization.reference import dequantize
from tests.support.models.hugging_face_model import tokenizer_files

VOCAB = 4096  # of `tokenizer_files`; rows behind the fixture's are 0

_ATTENTION = {
    "attn_q_a": "q_a_proj", "attn_q_a_norm": "q_a_layernorm", "attn_q_b": "q_b_proj", "attn_gate": "g_proj",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa", "attn_kv_a_norm": "kv_a_layernorm", "attn_output": "o_proj",
}  # fmt: skip
_DELTA = {
    "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj", "ssm_beta": "b_proj",
    "ssm_f_a": "f_a_proj", "ssm_f_b": "f_b_proj", "ssm_g": "g_proj", "ssm_norm": "o_norm",
    "ssm_conv1d_q": "q_conv1d", "ssm_conv1d_k": "k_conv1d", "ssm_conv1d_v": "v_conv1d",
}  # fmt: skip
_FFN = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_MOE = {
    "ffn_gate_inp": "gate", "ffn_routed_down": "routed_expert_down_proj", "ffn_routed_up": "routed_expert_up_proj",
    "ffn_routed_norm": "routed_expert_norm", **{f"{ours}_shexp": f"shared_experts.{t}" for ours, t in _FFN.items()},
}  # fmt: skip
_EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
_RESIDUALS = {"attn_res_score": "self_attention_res", "ffn_res_score": "mlp_res"}


def write_folder(gguf: Path, folder: Path, **changes: Any) -> Path:
    """Writes the folder, with matrices in float16. changes: of the text_config; ... removes."""
    source = open_model(gguf)
    folder.mkdir(parents=True)
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    text = {name: value for name, value in (_text_config(source) | changes).items() if value is not ...}
    config = {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text,
        "tie_word_embeddings": False, "vision_config": {"vt_hidden_size": 64},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"language_model.{name}": each.contiguous() for name, each in _tensors(source).items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _text_config(source: ModelSource) -> dict[str, Any]:
    def of(key: str) -> Any:
        return source.metadata[f"kimi-k3.{key}"]

    rotary, kv_heads = of("rope.dimension_count"), of("attention.head_count_kv").tolist()
    attending = [layer + 1 for layer, heads in enumerate(kv_heads) if heads]
    return {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": VOCAB,
        "hidden_size": of("embedding_length"), "num_hidden_layers": of("block_count"), "hidden_act": "situ",
        "intermediate_size": of("feed_forward_length"), "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "num_attention_heads": of("attention.head_count"), "num_key_value_heads": of("attention.head_count"),
        "max_position_embeddings": of("context_length"), "q_lora_rank": of("attention.q_lora_rank"),
        "kv_lora_rank": of("attention.kv_lora_rank"), "v_head_dim": of("attention.value_length_mla"),
        "qk_nope_head_dim": of("attention.key_length_mla") - rotary, "qk_rope_head_dim": rotary,
        "mla_use_nope": True, "mla_use_output_gate": True, "latent_moe_use_norm": True, "moe_layer_freq": 1,
        "num_experts": of("expert_count"), "num_experts_per_token": of("expert_used_count"),
        "moe_intermediate_size": of("expert_feed_forward_length"), "num_shared_experts": of("expert_shared_count"),
        "routed_expert_hidden_size": of("expert_latent_length"), "moe_renormalize": True, "topk_method": "noaux_tc",
        "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True,
        "routed_scaling_factor": of("expert_weights_scale"), "first_k_dense_replace": of("leading_dense_block_count"),
        "activation_situ_beta": of("activation.situ_beta"), "num_nextn_predict_layers": 0,
        "activation_situ_linear_beta": of("activation.situ_linear_beta"),
        "attn_res_block_size": of("attn_res.block_size"),
        "linear_attn_config": {
            "full_attn_layers": attending, "head_dim": of("kda.head_dim"), "num_heads": of("attention.head_count"),
            "kda_layers": [layer + 1 for layer in range(len(kv_heads)) if layer + 1 not in attending],
            "short_conv_kernel_size": of("ssm.conv_kernel"), "use_full_rank_gate": True,
            "gate_lower_bound": of("kda.gate_lower_bound"),
        },
    }  # fmt: skip


def _tensors(source: ModelSource) -> dict[str, torch.Tensor]:
    def read(name: str) -> torch.Tensor:
        tensor = source.tensors[name]
        values = torch.from_numpy(dequantize(tensor.type, source.data(name))).reshape(tensor.shape)
        return values.half() if tensor.type.name == "F16" else values

    def score(name: str, theirs: str) -> dict[str, torch.Tensor]:
        """The product's weight, and a norm's of powers of two, which changes no bit of it."""
        fused = read(name)
        norm = 2.0 ** (torch.arange(len(fused)) % 3 - 1)
        return {f"{theirs}_norm.weight": norm, f"{theirs}_proj.weight": (fused / norm)[None]}

    def padded(name: str) -> torch.Tensor:
        rows = read(name)
        return torch.cat([rows, rows.new_zeros(VOCAB - len(rows), rows.shape[1])])

    found = {
        "model.embed_tokens.weight": padded(n.TOKEN_EMBD),
        "model.norm.weight": read(n.OUTPUT_NORM),
        "lm_head.weight": padded(n.OUTPUT),
        **score("output_res_score.weight", "model.output_attn_res"),
    }
    for layer in range(source.metadata.require_int("kimi-k3.block_count", 1, 64)):
        parts = {
            name.removeprefix(f"blk.{layer}."): name for name in source.tensors if n.layer_of(name) == layer
        }
        found |= {f"model.layers.{layer}.{name}": each for name, each in _layer(parts, read, score).items()}
    return found


def _layer(parts: dict[str, str], read: Any, score: Any) -> dict[str, torch.Tensor]:
    is_delta, is_moe = "ssm_a" in parts, "ffn_gate_inp.weight" in parts
    names = {
        f"{ours}.weight": f"self_attn.{t}.weight" for ours, t in (_DELTA if is_delta else _ATTENTION).items()
    }
    names |= {
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
    }
    under = "block_sparse_moe." if is_moe else "mlp."
    names |= {f"{ours}.weight": f"{under}{t}.weight" for ours, t in (_MOE if is_moe else _FFN).items()}
    names |= {"exp_probs_b.bias": f"{under}gate.e_score_correction_bias"} if is_moe else {}
    names |= {"ssm_dt.bias": "self_attn.dt_bias"} if is_delta else {}
    found = {theirs: read(parts[ours]) for ours, theirs in names.items()}
    for ours, theirs in _RESIDUALS.items():
        found |= score(parts[f"{ours}.weight"], theirs)
    if is_delta:
        found["self_attn.A_log"] = torch.log(-read(parts["ssm_a"]).double()).float().reshape(-1)
        for each in ("q_conv1d", "k_conv1d", "v_conv1d"):
            conv = found[f"self_attn.{each}.weight"]
            found[f"self_attn.{each}.weight"] = conv.reshape(-1, 1, conv.shape[-1])
    else:
        k_b, v_b = read(parts["attn_k_b.weight"]), read(parts["attn_v_b.weight"])
        found["self_attn.kv_b_proj.weight"] = torch.cat([k_b.transpose(1, 2), v_b], dim=1).flatten(0, 1)
    for ours, theirs in _EXPERTS.items() if is_moe else ():
        matrices = read(parts[f"{ours}.weight"])
        found |= {f"{under}experts.{index}.{theirs}.weight": each for index, each in enumerate(matrices)}
    return found
