"""A tiny GLM-5.3-Flash with random weights: transformers' model, and a GGUF file of the same weights, named and
arranged as llama.cpp's converter does and quantised by gguf-py."""

from __future__ import annotations

import zlib
from collections.abc import Callable
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

HIDDEN, EXPERTS, WIDTH, LAYERS, BOUND, CLAMP = 64, 6, 32, 4, -5.0, 1.5
HEADS, KEY_DIM, VALUE_DIM, RANK = 2, 64, 32, 96
INDEX_HEADS, INDEX_DIM, POOLED, CHOSEN = 4, 32, 8, 3  # three blocks of eight keys
DENSE_UP_TO = (CHOSEN + 1) * POOLED - 1  # tokens of which every query attends to all
LINEAR = ("linear_attention", "linear_attention", "indexed_attention", "indexed_attention")

Array = npt.NDArray[np.float32]


def new_model(seed: int, **settings: Any) -> Any:
    """Glm5NextForConditionalGeneration in float32 with seeded weights. settings: of its text, in place of this
    module's."""
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    vocab = len(open_gguf(TINY_MODEL).metadata.require_strings("tokenizer.ggml.tokens"))
    usual: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": 96, "moe_intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "n_shared_experts": 1, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5,
        "kv_lora_rank": RANK, "q_lora_rank": 32, "qk_rope_head_dim": 0, "qk_nope_head_dim": KEY_DIM,
        "v_head_dim": VALUE_DIM, "index_topk": CHOSEN * POOLED, "index_kpool": POOLED, "index_head_dim": INDEX_DIM,
        "index_n_heads": INDEX_HEADS, "layer_types": list(LINEAR), "linear_head_dim": 32, "linear_num_heads": HEADS,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "linear_conv_kernel_dim": 3,
        "linear_lower_bound": BOUND, "swiglu_limit": CLAMP, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
        "pad_token_id": 0,
    }  # fmt: skip
    tower = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
    }
    config: Any = Glm5NextConfig(text_config=usual | settings, vision_config=tower, tie_word_embeddings=False)
    for each in (config, config.text_config):
        each._attn_implementation = each._experts_implementation = "eager"
    model: Any = Glm5NextForConditionalGeneration(config)
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
        normal = rng.uniform(np.log(0.3), np.log(2.0), shape)
    elif name.endswith("dt_bias"):
        normal -= 1.0
    elif name.endswith(("_hc.base", "compress_ape")):
        normal *= 1.5
    elif name.endswith("_hc.scale") or (len(shape) == 1 and "norm" in name and not name.endswith("bias")):
        normal = 0.2 * normal + 1.0
    elif len(shape) == 1 or name.endswith("conv1d.weight"):
        normal *= 0.4
    elif "embed_tokens" not in name:
        louder = {
            "lm_head": 4.0,
            "mlp.gate.weight": 2.0,
            "_hc.fn": 2.0,
            "gate_up": 1.5,
            "gate_proj": 1.5,
            "up_proj": 1.5,
        }
        normal *= next((by for part, by in louder.items() if part in name), 1.0) / np.sqrt(shape[-1])
    return np.ascontiguousarray(normal, np.float32)


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), vocab]."""
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return found


def write_model(
    model: Any, path: Path, matrices: Type, *, architecture: str = "glm5-next", **settings: Any
) -> Path:
    """Writes `model`'s weights, with matrices of this type where its blocks fit their columns, and gives the model what
    the file then holds, dequantised. settings: of the file in place of the model's, "." as "__"; None: left out."""
    writer = GGUFWriter(path, architecture)
    changed = {name.replace("__", "."): value for name, value in settings.items()}
    _add_settings(writer, model, architecture, changed)
    weights = model.state_dict()
    for name, (theirs, into, back) in _tensors(model).items():
        value = into(weights[theirs])
        array: Array = np.ascontiguousarray(value.numpy(), np.float32)
        kind = matrices if _is_quantised(name, array) else Type.F32
        stored = quantize(array, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        exact = torch.from_numpy(ggml_values(int(kind), stored).reshape(array.shape))
        if kind != Type.F32:
            back(weights[theirs], exact)
    model.load_state_dict(weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _is_quantised(name: str, array: Array) -> bool:
    """What llama.cpp's converter keeps as float32 in files of every type."""
    kept = (".hc_", ".ssm_", "indexer", "ffn_gate_inp", "_b.weight", "attn_kv_a_mqa", "exp_probs")
    return array.ndim > 1 and not any(part in name for part in kept)


def _add_settings(writer: GGUFWriter, model: Any, architecture: str, changed: dict[str, Any]) -> None:
    c, key = model.config.text_config, f"{architecture}."
    attends = [int(kind != "linear_attention") for kind in c.layer_types]
    settings: dict[str, Any] = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": attends, "expert_count": EXPERTS,
        "expert_used_count": c.num_experts_per_tok, "expert_group_count": 1, "expert_group_used_count": 1,
        "expert_gating_func": 2, "expert_feed_forward_length": c.moe_intermediate_size, "expert_shared_count": 1,
        "expert_weights_scale": c.routed_scaling_factor, "expert_weights_norm": True,
        "leading_dense_block_count": c.mlp_layer_types.count("dense"),
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "attention.layer_norm_epsilon": 1e-6,
        "kda.gate_lower_bound": c.linear_lower_bound or 0.0,
        "ssm.conv_kernel": c.linear_conv_kernel_dim, "kda.head_dim": c.linear_head_dim,
        "attention.q_lora_rank": c.q_lora_rank, "attention.kv_lora_rank": c.kv_lora_rank, "rope.dimension_count": 0,
        "attention.key_length": c.kv_lora_rank, "attention.value_length": c.kv_lora_rank,
        "attention.key_length_mla": c.qk_nope_head_dim, "attention.value_length_mla": c.v_head_dim,
        "attention.indexer.head_count": c.index_n_heads, "attention.indexer.key_length": c.index_head_dim,
        "attention.indexer.top_k": c.index_topk, "attention.indexer.kpool": c.index_kpool,
        "attention.indexer.kpool_select_tail": True, "attention.indexer.types": [True] * c.num_hidden_layers,
        "hyper_connection.count": c.hc_mult, "hyper_connection.sinkhorn_iterations": c.hc_sinkhorn_iters,
        "hyper_connection.epsilon": c.hc_eps,
        **{f"swiglu_clamp_{kind}": [float(c.swiglu_limit)] * c.num_hidden_layers for kind in ("exp", "shexp")},
    }  # fmt: skip
    for name, value in (settings | changed).items():
        if value is None:
            continue
        add: dict[type, Any] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        add[type(value)](key + name, value)
    add_tokenizer(writer)


Part = tuple[str, Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor, torch.Tensor], Any]]


def _whole(theirs: str) -> Part:
    return theirs, lambda w: w, lambda w, exact: w.copy_(exact)


def _rows(theirs: str, dim: int, rows: slice) -> Part:
    def part(w: torch.Tensor) -> torch.Tensor:
        return w[rows] if dim == 0 else w[:, rows]

    return theirs, part, lambda w, exact: part(w).copy_(exact)


_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
} | {
    f"hc_{ours}_{part}.weight": f"{ours}_hc.{part}"
    for ours in ("attn", "ffn")
    for part in ("fn", "base", "scale")
}
_KDA = {f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in "qkv"} | {
    "ssm_beta.weight": "self_attn.b_proj.weight",
    "ssm_dt.bias": "self_attn.forget_gate.dt_bias",
    "ssm_f_a.weight": "self_attn.forget_gate.f_a_proj.weight",
    "ssm_f_b.weight": "self_attn.forget_gate.f_b_proj.weight",
    "ssm_g_a.weight": "self_attn.g_a_proj.weight",
    "ssm_g_b.weight": "self_attn.g_b_proj.weight",
    "ssm_norm.weight": "self_attn.o_norm.weight",
}
_MLA = {
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "indexer.attn_k.weight": "self_attn.indexer.wk.weight",
    "indexer.attn_q_b.weight": "self_attn.indexer.wq_b.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "indexer.proj.weight": "self_attn.indexer.weights_proj.weight",
    "indexer_compressor_ape.weight": "self_attn.indexer.index_kpool_compress_ape",
    "indexer_compressor_gate.weight": "self_attn.indexer.index_kpool_compress_gate",
}
_DENSE = {f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
_MOE = {
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
} | {f"ffn_{part}_shexp.weight": f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")}


def _tensors(model: Any) -> dict[str, Part]:
    """GGUF name → transformers' name, what of it the tensor holds, and how that is put back."""
    c, under = model.config.text_config, "model.language_model."
    found = {
        "token_embd.weight": _whole(under + "embed_tokens.weight"),
        "output.weight": _whole("lm_head.weight"),
        "output_norm.weight": _whole(under + "norm.weight"),
    }
    for i, (kind, ffn) in enumerate(zip(c.layer_types, c.mlp_layer_types, strict=True)):
        ours, theirs = f"blk.{i}.", f"{under}layers.{i}."
        is_linear, is_dense = kind == "linear_attention", ffn == "dense"
        names = _LAYER | (_KDA if is_linear else _MLA) | (_DENSE if is_dense else _MOE)
        found |= {ours + a: _whole(theirs + b) for a, b in names.items()}
        if not is_dense:
            halves = {"gate": slice(c.moe_intermediate_size), "up": slice(c.moe_intermediate_size, None)}
            both = theirs + "mlp.experts.gate_up_proj"
            found |= {f"{ours}ffn_{part}_exps.weight": _rows(both, 1, rows) for part, rows in halves.items()}
        found |= _of_kda(ours, theirs, c) if is_linear else _of_mla(ours, theirs, c)
    return found


def _of_kda(ours: str, theirs: str, c: Any) -> dict[str, Part]:
    width = c.linear_head_dim * c.linear_num_heads
    parts = {
        f"{ours}ssm_conv1d_{part}.weight": _rows(
            theirs + "self_attn.conv1d.weight", 0, slice(i * width, (i + 1) * width)
        )
        for i, part in enumerate("qkv")
    }
    rate: Part = (theirs + "self_attn.forget_gate.A_log", lambda w: -w.exp(), lambda w, exact: None)
    return parts | {ours + "ssm_a": rate}


def _of_mla(ours: str, theirs: str, c: Any) -> dict[str, Part]:
    heads, k = c.num_attention_heads, c.qk_nope_head_dim
    both = theirs + "self_attn.kv_b_proj.weight"

    def by_head(w: torch.Tensor) -> torch.Tensor:
        return w.view(heads, -1, c.kv_lora_rank)

    return {
        ours + "attn_k_b.weight": (both, lambda w: by_head(w)[:, :k].transpose(1, 2), lambda w, exact: None),
        ours + "attn_v_b.weight": (both, lambda w: by_head(w)[:, k:], lambda w, exact: None),
    }
