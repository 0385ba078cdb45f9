"""A GGUF of the toy architecture, written by gguf-py: its own metadata keys, its own tensors, random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from tests.support.models.gguf_bytes import MERGES, TOKEN_TYPES, TOKENS

Weights = dict[str, npt.NDArray[np.floating]]

# No two of these sizes are equal: an exchanged dimension cannot pass.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 96, 4, 2, 32, 2
EXPERTS, TOP_K, WIDTH, SHARED_WIDTH = 5, 2, 64, 160
VOCAB, CONTEXT = len(TOKENS), 256
EPS, THETA, SCALE = 1e-5, 10_000.0, 2.5


def random_weights(matrices: type[np.floating] = np.float32, seed: int = 3) -> Weights:
    """By GGUF's names, matrices [out, in]. Vectors are float32."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> npt.NDArray[np.floating]:
        return rng.normal(0, 1.5 / np.sqrt(shape[-1]), shape).astype(matrices)

    def norm(size: int) -> npt.NDArray[np.floating]:
        return rng.normal(1, 0.2, size).astype(np.float32)

    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weights: Weights = {
        "token_embd.weight": matrix(VOCAB, HIDDEN),
        "output_norm.weight": norm(HIDDEN),
        "output.weight": matrix(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        parts = {
            "attn_norm": norm(HIDDEN),
            "attn_q": matrix(q, HIDDEN),
            "attn_k": matrix(kv, HIDDEN),
            "attn_v": matrix(kv, HIDDEN),
            "attn_q_norm": norm(q),
            "attn_k_norm": norm(kv),
            "attn_output": matrix(HIDDEN, q),
            "ffn_norm": norm(HIDDEN),
            "ffn_gate_inp": matrix(EXPERTS, HIDDEN),
            "ffn_gate_exps": matrix(EXPERTS, WIDTH, HIDDEN),
            "ffn_up_exps": matrix(EXPERTS, WIDTH, HIDDEN),
            "ffn_down_exps": matrix(EXPERTS, HIDDEN, WIDTH),
            "ffn_gate_shexp": matrix(SHARED_WIDTH, HIDDEN),
            "ffn_up_shexp": matrix(SHARED_WIDTH, HIDDEN),
            "ffn_down_shexp": matrix(HIDDEN, SHARED_WIDTH),
        }
        weights |= {f"blk.{layer}.{part}.weight": values for part, values in parts.items()}
    return weights


def write_model(path: Path, weights: Weights) -> Path:
    """The file of these tensors, whatever they are."""
    writer = GGUFWriter(path, "toymoe")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_feed_forward_length(WIDTH)
    writer.add_expert_shared_feed_forward_length(SHARED_WIDTH)
    writer.add_expert_weights_scale(SCALE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types(TOKEN_TYPES)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    for name, values in weights.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
