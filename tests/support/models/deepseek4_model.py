"""A tiny DeepSeek-V4 with random weights: transformers' model, and a GGUF file of the same weights, named and arranged
as llama.cpp's converter does and quantised by gguf-py."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import quantize

from moeserve.models.sources.gguf import open_gguf
from tests.conftest import TINY_MODEL
from tests.support.models.ggml_types import ggml_values
from tests.support.models.gguf_entries import add_tokenizer

HIDDEN, EXPERTS, TOP_K, WIDTH = 128, 8, 3, 32
HEADS, HEAD_DIM, ROTARY, Q_RANK = 4, 128, 16, 64
GROUPS, OUTPUT_RANK, WINDOW = 2, 64, 24
INDEX_HEADS, INDEX_DIM, CHOSEN = 8, 64, 8
LONG_RATIO = 16
KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
RATIOS = (0, 4, LONG_RATIO)
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

Array = npt.NDArray[np.float32]


def new_model(seed: int, **settings: Any) -> Any:
    """DeepseekV4ForCausalLM in float32 with seeded weights. settings: in place of this module's."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    vocab = len(open_gguf(TINY_MODEL).metadata.require_strings("tokenizer.ggml.tokens"))
    usual: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": HIDDEN, "num_hidden_layers": len(KINDS), "num_attention_heads": HEADS,
        "num_key_value_heads": 1, "head_dim": HEAD_DIM, "partial_rotary_factor": ROTARY / HEAD_DIM,
        "q_lora_rank": Q_RANK, "moe_intermediate_size": WIDTH, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
        "num_experts_per_tok": TOP_K, "routed_scaling_factor": 1.5, "layer_types": list(KINDS),
        "mlp_layer_types": ["hash_moe"] + ["moe"] * (len(KINDS) - 1),
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": LONG_RATIO},
        "hc_mult": 4, "swiglu_limit": 1.5, "sliding_window": WINDOW, "o_groups": GROUPS, "o_lora_rank": OUTPUT_RANK,
        "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM, "index_topk": CHOSEN, "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": 0, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "rope_theta": 1e4, "compress_rope_theta": 1.6e5,
    }  # fmt: skip
    config = DeepseekV4Config(**(usual | settings))
    config._attn_implementation = config._experts_implementation = "eager"
    model: Any = DeepseekV4ForCausalLM(config)
    model.eval().float()
    weights = model.state_dict()
    for name, value in weights.items():
        if name.endswith("tid2eid"):
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            weights[name] = torch.from_numpy(
                rng.permuted(np.tile(np.arange(EXPERTS), (vocab, 1)), axis=1)[:, :TOP_K]
            )
        elif value.is_floating_point():
            weights[name] = torch.from_numpy(_draw(name, tuple(value.shape), seed))
    model.load_state_dict(weights)
    return model


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """Random weights with which every part of the network is heard in the logits."""
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if name.endswith(("position_bias", "sinks", "_hc.base", "hc_base", "e_score_correction_bias")):
        normal *= 0.5
    elif name.endswith(("_hc.scale", "hc_scale")) or len(shape) == 1:
        normal = 0.1 * normal + 1.0
    elif "embed_tokens" not in name:
        louder = {"lm_head": 12.0, "mlp.gate.weight": 2.0, "o_b_proj": 2.0, "gate_proj": 2.0, "indexer": 2.0}
        normal *= next((by for part, by in louder.items() if part in name), 1.0) / np.sqrt(shape[-1])
    return np.ascontiguousarray(normal, np.float32)


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), vocab]."""
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return found


def write_model(model: Any, path: Path, matrices: Type, **numbers: int) -> Path:
    """Writes `model`'s weights, with matrices of this type where its blocks fit their columns, and gives the model what
    the file then holds, dequantised. numbers: settings of the file in place of the model's, "." as "__"."""
    writer = GGUFWriter(path, "deepseek4")
    _add_settings(writer, model, {name.replace("__", "."): number for name, number in numbers.items()})
    weights = model.state_dict()
    for name, (theirs, rows) in _tensors(model).items():
        value = weights[theirs] if rows is None else weights[theirs][:, rows]
        if theirs.endswith("tid2eid"):
            writer.add_tensor(name, value.numpy().astype(np.int32))
            continue
        array: Array = np.ascontiguousarray(value.numpy(), np.float32)
        is_plain = array.ndim == 1 or name.endswith(("ffn_gate_inp.weight", "_ape.weight"))
        kind = Type.F32 if is_plain else matrices
        stored = quantize(array, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        exact = torch.from_numpy(ggml_values(int(kind), stored).reshape(array.shape))
        (weights[theirs] if rows is None else weights[theirs][:, rows]).copy_(exact)
    model.load_state_dict(weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_settings(writer: GGUFWriter, model: Any, changed: dict[str, int]) -> None:
    c, key = model.config, "deepseek4."
    layers = c.num_hidden_layers
    numbers = {
        "block_count": layers, "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": 1,
        "attention.key_length": c.head_dim, "attention.value_length": c.head_dim, "rope.dimension_count": ROTARY,
        "attention.q_lora_rank": c.q_lora_rank, "attention.sliding_window": c.sliding_window,
        "attention.output_group_count": c.o_groups, "attention.output_lora_rank": c.o_lora_rank,
        "attention.indexer.head_count": c.index_n_heads, "attention.indexer.key_length": c.index_head_dim,
        "attention.indexer.top_k": c.index_topk, "expert_count": EXPERTS, "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size, "expert_shared_count": 1, "expert_gating_func": 4,
        "hash_layer_count": 1, "hyper_connection.count": c.hc_mult,
        "hyper_connection.sinkhorn_iterations": c.hc_sinkhorn_iters,
    }  # fmt: skip
    for name, number in (numbers | changed).items():
        writer.add_uint32(key + name, number)
    floats = {
        "rope.freq_base": 1e4, "attention.compress_rope_freq_base": 1.6e5,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "hyper_connection.epsilon": c.hc_eps,
        "expert_weights_scale": c.routed_scaling_factor,
    }  # fmt: skip
    scaling = c.rope_parameters["compress"]
    if scaling["rope_type"] == "yarn":
        writer.add_string(key + "rope.scaling.type", "yarn")
        writer.add_uint32(
            key + "rope.scaling.original_context_length", scaling["original_max_position_embeddings"]
        )
        floats["rope.scaling.factor"] = scaling["factor"]
    for name, value in floats.items():
        writer.add_float32(key + name, value)
    writer.add_bool(key + "expert_weights_norm", True)
    writer.add_array(key + "attention.compress_ratios", list(RATIOS))
    for kind in ("exp", "shexp"):
        writer.add_array(f"{key}swiglu_clamp_{kind}", [float(c.swiglu_limit)] * layers)
    add_tokenizer(writer)


_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_norm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv.weight": "self_attn.kv_proj.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_norm.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_output_a.weight": "self_attn.o_a_proj.weight",
    "attn_output_b.weight": "self_attn.o_b_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
} | {
    f"hc_{ours}_{part}.weight": f"{ours}_hc.{part}"
    for ours in ("attn", "ffn")
    for part in ("fn", "base", "scale")
}
_COMPRESSOR = {
    "kv": "kv_proj.weight",
    "gate": "gate_proj.weight",
    "ape": "position_bias",
    "norm": "kv_norm.weight",
}
_INDEXER = {"attn_q_b": "q_b_proj", "proj": "scorer.weights_proj"}


def _tensors(model: Any) -> dict[str, tuple[str, slice | None]]:
    """GGUF name → transformers' name, and the part of its second dimension."""
    found: dict[str, tuple[str, slice | None]] = {
        "token_embd.weight": ("model.embed_tokens.weight", None),
        "output.weight": ("lm_head.weight", None),
        "output_norm.weight": ("model.norm.weight", None),
    }
    found |= {
        f"output_hc_{part}.weight": (f"model.hc_head.hc_{part}", None) for part in ("fn", "base", "scale")
    }
    for i in range(model.config.num_hidden_layers):
        ours, theirs = f"blk.{i}.", f"model.layers.{i}."
        names = dict(_LAYER)
        if i == 0:
            names["ffn_gate_tid2eid.weight"] = "mlp.gate.tid2eid"
        else:
            names["exp_probs_b.bias"] = "mlp.gate.e_score_correction_bias"
        if RATIOS[i]:
            names |= {
                f"attn_compressor_{a}.weight": f"self_attn.compressor.{b}" for a, b in _COMPRESSOR.items()
            }
        if RATIOS[i] == 4:
            of_index = "self_attn.compressor.indexer."
            names |= {f"indexer_compressor_{a}.weight": of_index + b for a, b in _COMPRESSOR.items()}
            names |= {f"indexer.{a}.weight": f"{of_index}{b}.weight" for a, b in _INDEXER.items()}
        found |= {ours + a: (theirs + b, None) for a, b in names.items()}
        halves = {"ffn_gate_exps.weight": slice(WIDTH), "ffn_up_exps.weight": slice(WIDTH, None)}
        found |= {ours + a: (theirs + "mlp.experts.gate_up_proj", rows) for a, rows in halves.items()}
    return found
