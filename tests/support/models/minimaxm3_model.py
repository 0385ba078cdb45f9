"""A tiny MiniMax-M3 with random weights: transformers' model, and a GGUF file of the same weights, arranged as
llama.cpp's converter does and quantised by gguf-py."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import quantize

from tests.support.models.ggml_types import ggml_values
from tests.support.models.tiny_vocabulary import add_vocabulary, vocabulary_size

SETTINGS: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts_per_tok": 3, "num_local_experts": 8,
    "dense_intermediate_size": 256, "shared_intermediate_size": 64, "routed_scaling_factor": 2.0, "rotary_dim": 32,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "index_n_heads": 2, "index_head_dim": 64, "index_block_size": 16,
    "index_topk_blocks": 3, "index_local_blocks": 1, "max_position_embeddings": 4096,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
}  # fmt: skip


def new_model(seed: int, **settings: Any) -> Any:
    """MiniMaxM3VLForCausalLM in float32 with seeded weights. settings: in place of SETTINGS."""
    from transformers import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    config = MiniMaxM3VLTextConfig(vocab_size=vocabulary_size(), **(SETTINGS | settings))
    config._attn_implementation = config._experts_implementation = "eager"
    model: Any = MiniMaxM3VLForCausalLM(config)
    model.eval().float()
    weights = model.state_dict()
    for name, value in weights.items():
        weights[name] = torch.from_numpy(_draw(name, tuple(value.shape), seed))
    model.load_state_dict(weights)
    return model


def _draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Random weights with which every part of the network is heard in the logits, and the clamp acts."""
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if name.endswith("e_score_correction_bias"):
        normal *= 0.2
    elif re.search(r"\.[qk]_norm\.weight", name):
        normal = 0.3 * normal + 0.4
    elif len(shape) == 1:
        normal *= 0.1
    elif "embed_tokens" not in name:
        louder = {"lm_head": 3.5, "mlp.gate.weight": 2.0, "gate_up_proj": 3.5, "down_proj": 0.2}
        normal *= next((by for part, by in louder.items() if part in name), 1.0) / np.sqrt(shape[-1])
    return np.ascontiguousarray(normal, np.float32)


def write_model(model: Any, path: Path, matrices: Type) -> Path:
    """Writes `model`'s weights, with matrices of this type, and gives the model what the file then holds,
    dequantised."""
    writer = GGUFWriter(path, "minimax-m3")
    _add_settings(writer, model.config)
    weights = model.state_dict()
    for name, (theirs, rows) in _tensors(model.config).items():
        part = weights[theirs][..., rows, :] if rows is not None else weights[theirs]
        is_norm = part.ndim == 1 and not name.endswith(".bias")  # transformers multiplies by 1 + weight
        kind = Type.F32 if part.ndim == 1 or "indexer" in name or "gate_inp" in name else matrices
        stored = quantize(np.ascontiguousarray(part.numpy() + np.float32(is_norm)), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        exact = ggml_values(int(kind), stored).reshape(part.shape) - np.float32(is_norm)
        part.copy_(torch.from_numpy(np.ascontiguousarray(exact)))
    model.load_state_dict(weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_settings(writer: GGUFWriter, config: Any) -> None:
    key = "minimax-m3."
    numbers = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.dense_intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2, "expert_shared_count": 1,
        "rope.dimension_count": config.rotary_dim, "leading_dense_block_count": 1,
        "attention.indexer.head_count": config.index_n_heads, "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk_blocks, "attention.indexer.block_size": config.index_block_size,
        "attention.indexer.local_blocks": config.index_local_blocks,
    }  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(key + name, number)
    writer.add_float32(key + "rope.freq_base", 5e6)
    writer.add_float32(key + "attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(key + "expert_weights_scale", config.routed_scaling_factor)
    writer.add_bool(key + "expert_weights_norm", True)
    add_vocabulary(writer)


def _tensors(config: Any) -> dict[str, tuple[str, slice | None]]:
    """The file's tensors, with transformers' name of each, and the rows of it that are the file's (None: all)."""
    found: dict[str, tuple[str, slice | None]] = {
        "token_embd.weight": ("model.embed_tokens.weight", None),
        "output.weight": ("lm_head.weight", None),
        "output_norm.weight": ("model.norm.weight", None),
    }
    attention = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "output": "o_proj", "q_norm": "q_norm",
                 "k_norm": "k_norm"}  # fmt: skip
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        names = {f"attn_{part}": f"self_attn.{name}" for part, name in attention.items()}
        names |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        if config.layer_types[layer] == "minimax_m3_sparse":
            names |= {
                f"indexer.{p}": f"self_attn.indexer.{p}" for p in ("q_proj", "k_proj", "q_norm", "k_norm")
            }
        found |= {f"{ours}{name}.weight": (f"{theirs}{of}.weight", None) for name, of in names.items()}
        if config.mlp_layer_types[layer] == "dense":
            found |= _feed_forward(ours, "", f"{theirs}mlp.", ".weight", config.dense_intermediate_size)
            continue
        found |= _feed_forward(ours, "_exps", f"{theirs}mlp.experts.", "", config.intermediate_size)
        width = config.shared_intermediate_size
        found |= _feed_forward(ours, "_shexp", f"{theirs}mlp.shared_experts.", ".weight", width)
        found[f"{ours}ffn_gate_inp.weight"] = (f"{theirs}mlp.gate.weight", None)
        found[f"{ours}exp_probs_b.bias"] = (f"{theirs}mlp.gate.e_score_correction_bias", None)
    return found


def _feed_forward(
    ours: str, suffix: str, theirs: str, ending: str, width: int
) -> dict[str, tuple[str, slice | None]]:
    return {
        f"{ours}ffn_gate{suffix}.weight": (f"{theirs}gate_up_proj{ending}", slice(0, width)),
        f"{ours}ffn_up{suffix}.weight": (f"{theirs}gate_up_proj{ending}", slice(width, None)),
        f"{ours}ffn_down{suffix}.weight": (f"{theirs}down_proj{ending}", None),
    }


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """float64 [len(tokens), vocab]."""
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].double()
    return found
