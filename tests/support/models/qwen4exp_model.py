"""A tiny Qwen3.8-Flash-Next with random weights: transformers' model, and a GGUF file of the same weights, arranged as
llama.cpp's converter does and quantised by gguf-py."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Type
from gguf.constants import GGUFValueType
from gguf.quants import quantize

from tests.support.models.ggml_types import ggml_values
from tests.support.models.tiny_vocabulary import add_vocabulary, vocabulary_size

HIDDEN, LAYERS, EXPERTS, TOP_K, WIDTH, SHARED = 128, 4, 8, 3, 32, 64
HEADS, HEAD_DIM, ROTARY = 2, 256, 64
KEY_HEADS, VALUE_HEADS, DELTA_DIM = 2, 6, 128
STREAMS, LOW_RANK = 4, 32
NGRAM, NGRAM_HEADS, NGRAM_ROWS, NGRAM_TAPS = 3, 2, 300, 4
INDEX_HEADS, INDEX_DIM, BUDGET, RATIO = 8, 128, 32, 4
END = 633  # the tokenizer's end of text

Array = npt.NDArray[np.float32]


def new_model(seed: int, **settings: Any) -> Any:
    """Qwen4ExpForCausalLM in float32 with seeded weights. settings: in place of this module's."""
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    usual: dict[str, Any] = {
        "vocab_size": vocabulary_size(), "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1, "head_dim": HEAD_DIM, "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS, "linear_key_head_dim": DELTA_DIM, "linear_value_head_dim": DELTA_DIM,
        "linear_conv_kernel_dim": 4, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": SHARED, "output_gate_type": "sigmoid",
        "hc_count": STREAMS, "hc_lowrank": LOW_RANK, "ple_layer_ids": [2], "ple_embed_dim": HIDDEN,
        "ple_conv_kernel_size": NGRAM_TAPS, "ngram_size": NGRAM, "heads_per_ngram": NGRAM_HEADS,
        "ngram_vocab_size_base": NGRAM_ROWS, "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": 1,
        "indexer_n_heads": INDEX_HEADS, "indexer_kv_heads": 1, "indexer_head_dim": INDEX_DIM, "indexer_budget": BUDGET,
        "indexer_compress_ratio": RATIO, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "eos_token_id": END, "bos_token_id": END - 2, "pad_token_id": END - 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": ROTARY / HEAD_DIM,
                            "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    }  # fmt: skip
    config = Qwen4ExpTextConfig(**(usual | settings))
    config._attn_implementation = config._experts_implementation = "eager"
    model: Any = Qwen4ExpForCausalLM(config)
    model.eval().float()
    weights = model.state_dict()
    for name, value in weights.items():
        if value.is_floating_point():
            weights[name] = torch.from_numpy(_draw(name, tuple(value.shape), seed))
    model.load_state_dict(weights)
    return model


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """Random weights with which every part of the network is heard in the logits."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    normal = rng.standard_normal(shape)
    if name.endswith("A_log"):
        normal = rng.uniform(np.log(0.05), np.log(4.0), shape)
    elif name.endswith("dt_bias"):
        normal -= 1.0
    elif "conv1d" in name:
        normal *= 0.5
    elif re.search(r"\.[qk]_(layer)?norm\.weight", name):
        normal = 0.3 * normal + 0.4
    elif len(shape) == 1:
        normal = 0.1 * normal + (1.0 if name.endswith("linear_attn.norm.weight") else 0.0)
    elif "embed_tokens" not in name:
        louder = {"lm_head": 12.0, "mlp.gate.weight": 2.0, "o_proj": 2.0}
        normal *= next((by for part, by in louder.items() if part in name), 1.0) / np.sqrt(shape[-1])
    return np.ascontiguousarray(normal, np.float32)


def write_model(model: Any, path: Path, matrices: Type) -> Path:
    """Writes `model`'s weights, with matrices of this type where its blocks fit their columns, and gives the model what
    the file then holds, dequantised."""
    writer = GGUFWriter(path, "qwen4exp")
    _add_settings(writer, model)
    weights = model.state_dict()
    for name, (theirs, rows) in _tensors(model).items():
        value: Array = weights[theirs].numpy()
        is_plain = (
            value.ndim == 1 or "indexer" in name or "conv1d" in name or name.endswith("ffn_gate_inp.weight")
        )
        arranged, restore = _arranged(name, value if rows is None else value[..., rows, :])
        kind = Type.F32 if is_plain or arranged.ndim == 1 else matrices
        stored = quantize(arranged, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        exact = restore(ggml_values(int(kind), stored).reshape(arranged.shape)).reshape(
            value.shape if rows is None else value[..., rows, :].shape
        )
        target = weights[theirs] if rows is None else weights[theirs][..., rows, :]
        target.copy_(torch.from_numpy(np.ascontiguousarray(exact)))
    model.load_state_dict(weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_settings(writer: GGUFWriter, model: Any) -> None:
    c, key = model.config, "qwen4exp."
    numbers = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads, "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim, "expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size, "ssm.conv_kernel": 4,
        "ssm.state_size": c.linear_key_head_dim, "ssm.group_count": c.linear_num_key_heads,
        "ssm.time_step_rank": c.linear_num_value_heads,
        "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim, "full_attention_interval": 4,
        "rope.dimension_count": ROTARY, "hyper_connection.count": c.hc_count, "hyper_connection.low_rank": c.hc_lowrank,
        "attention.indexer.head_count": c.indexer_n_heads, "attention.indexer.key_length": c.indexer_head_dim,
        "attention.indexer.top_k": c.indexer_budget, "ple.ngram_size": c.ngram_size,
        "ple.heads_per_ngram": c.heads_per_ngram, "ple.conv_kernel": c.ple_conv_kernel_size,
        "ple.eos_token_id": c.eos_token_id,
        "embedding_length_per_layer_input": c.ple_embed_dim // ((c.ngram_size - 1) * c.heads_per_ngram),
    }  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(key + name, number)
    writer.add_float32(key + "rope.freq_base", 1e7)
    writer.add_float32(key + "attention.layer_norm_rms_epsilon", c.rms_norm_eps)
    attends = [kind != "linear_attention" for kind in c.layer_types]
    writer.add_array(key + "attention.compress_ratios", [c.indexer_compress_ratio * each for each in attends])
    writer.add_array(key + "rope.dimension_sections", [11, 11, 10, 0])
    embedding = model.model.layers[c.ple_layer_ids[0] - 1].ple.ple_embedding
    writer.add_array(key + "ple.layers", [layer - 1 for layer in c.ple_layer_ids])
    for name, values in (
        ("ple.layer_multipliers", embedding.layer_multipliers),
        ("ple.head_offsets", embedding.ngram_heads_offsets),
        ("ple.head_vocab_sizes", embedding.ngram_heads_vocab_sizes),
    ):
        writer.add_key_value(key + name, values.tolist(), GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT64)
    add_vocabulary(writer)


def _tensors(model: Any) -> dict[str, tuple[str, slice | None]]:
    """The file's tensors, with transformers' name of each, and the rows of it that are the file's (None: all)."""
    found: dict[str, tuple[str, slice | None]] = {
        "token_embd.weight": ("model.embed_tokens.weight", None),
        "output.weight": ("lm_head.weight", None),
    }
    mixers = {"output_hc": "model.hyper_connection_mixer."}
    for layer in range(model.config.num_hidden_layers):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        mixers |= {
            f"{ours}hc_attn": f"{theirs}attn_hyper_connection.",
            f"{ours}hc_ffn": f"{theirs}mlp_hyper_connection.",
        }
        width = model.config.moe_intermediate_size
        parts: dict[str, tuple[str, slice | None]] = {
            "ffn_gate_inp.weight": ("mlp.gate.weight", None),
            "ffn_gate_exps.weight": ("mlp.experts.gate_up_proj", slice(0, width)),
            "ffn_up_exps.weight": ("mlp.experts.gate_up_proj", slice(width, None)),
            "ffn_down_exps.weight": ("mlp.experts.down_proj", None),
            "ffn_gate_inp_shexp.weight": ("mlp.shared_expert_gate.weight", None),
        }
        parts |= {
            f"ffn_{p}_shexp.weight": (f"mlp.shared_expert.{p}_proj.weight", None)
            for p in ("gate", "up", "down")
        }
        parts |= _attention() if model.config.layer_types[layer] != "linear_attention" else _DELTA_NET
        if layer + 1 in model.config.ple_layer_ids:
            parts |= _NGRAMS
            found["per_layer_token_embd.weight"] = (f"{theirs}ple.ple_embedding.ngram_embedding.weight", None)
        found |= {ours + name: (theirs + their_name, rows) for name, (their_name, rows) in parts.items()}
    names = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
    for ours, theirs in mixers.items():
        injects = {} if ours == "output_hc" else {"inject": "block_inject_weight"}
        for part, name in (names | injects).items():
            found[f"{ours}_{part}.weight"] = (f"{theirs}{name}.weight", None)
    return found


def _attention() -> dict[str, tuple[str, slice | None]]:
    queries = INDEX_HEADS * INDEX_DIM
    names = {
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "output": "o_proj",
        "q_norm": "q_norm",
        "k_norm": "k_norm",
    }
    parts: dict[str, tuple[str, slice | None]] = {
        f"attn_{part}.weight": (f"self_attn.{name}.weight", None) for part, name in names.items()
    }
    return parts | {
        "indexer.q_proj.weight": ("self_attn.indexer.index_qk_proj.weight", slice(0, queries)),
        "indexer.k_proj.weight": ("self_attn.indexer.index_qk_proj.weight", slice(queries, None)),
        "indexer.q_norm.weight": ("self_attn.indexer.q_layernorm.weight", None),
        "indexer.k_norm.weight": ("self_attn.indexer.k_layernorm.weight", None),
    }


_DELTA_NET: dict[str, tuple[str, slice | None]] = {
    f"{name}": (f"linear_attn.{theirs}", None)
    for name, theirs in {
        "attn_qkv.weight": "in_proj_qkv.weight",
        "attn_gate.weight": "in_proj_z.weight",
        "ssm_beta.weight": "in_proj_b.weight",
        "ssm_alpha.weight": "in_proj_a.weight",
        "ssm_conv1d.weight": "conv1d.weight",
        "ssm_a": "A_log",
        "ssm_dt.bias": "dt_bias",
        "ssm_norm.weight": "norm.weight",
        "ssm_out.weight": "out_proj.weight",
    }.items()
}
_NGRAMS: dict[str, tuple[str, slice | None]] = {
    "ple_key.weight": ("ple.key_proj.weight", None),
    "ple_value.weight": ("ple.value_proj.weight", None),
    "ple_conv1d.weight": ("ple.conv1d.weight", None),
    **{f"ple_norm_{part}.weight": (f"ple.norm_{part}.weight", None) for part in ("key", "query", "conv")},
}


def _arranged(name: str, value: Array) -> tuple[Array, Any]:
    """The value as the file has it, and a function that leads such a value back."""
    part = name.split(".", 2)[-1] if name.startswith("blk.") else name
    if part == "ssm_a":
        order = _tiled(1)
        return -np.exp(value)[order], lambda x: np.log(-_undone(x, order))
    if part in ("ssm_dt.bias", "ssm_beta.weight", "ssm_alpha.weight"):
        return value[_tiled(1)], lambda x: _undone(x, _tiled(1))
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        keys = 2 * KEY_HEADS * DELTA_DIM
        order = np.concatenate([np.arange(keys), keys + _tiled(DELTA_DIM)])
        return value.reshape(len(value), -1)[order], lambda x: _undone(x, order)
    if part == "attn_gate.weight":
        return value[_tiled(DELTA_DIM)], lambda x: _undone(x, _tiled(DELTA_DIM))
    if part == "ssm_out.weight":
        order = _tiled(DELTA_DIM)
        return np.ascontiguousarray(value[:, order]), lambda x: _undone(x.T, order).T
    if part == "ple_conv1d.weight":
        return value.reshape(len(value), -1), lambda x: x
    if part == "ffn_gate_inp_shexp.weight":
        return value.reshape(-1), lambda x: x
    if value.ndim == 1 and part != "ssm_norm.weight":  # norms, by which transformers multiplies plus 1
        return value + 1, lambda x: x - 1
    return np.ascontiguousarray(value), lambda x: x


def _tiled(width: int) -> npt.NDArray[np.int64]:
    """Rows of value heads, first one of each key head, from those of a key head together."""
    rows = np.arange(VALUE_HEADS * width).reshape(KEY_HEADS, VALUE_HEADS // KEY_HEADS, width)
    return np.ascontiguousarray(rows.swapaxes(0, 1)).reshape(-1)


def _undone(value: Array, order: npt.NDArray[np.int64]) -> Array:
    restored = np.empty_like(value)
    restored[order] = value
    return restored


def logits(model: Any, tokens: list[int], positions: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [len(tokens), vocab]. positions: int [3, len(tokens)] of RoPE, by section; None: the tokens' numbers."""
    given = {} if positions is None else {"position_ids": positions[:, None]}
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False, **given).logits[0].double()
    return found


def text(seed: int, length: int = 120) -> list[int]:
    """Random tokens, in which some n-grams come again and one is cut by an end."""
    found: list[int] = torch.randint(
        0, END, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    found[40] = END
    found[60:70] = found[20:30]
    return found
