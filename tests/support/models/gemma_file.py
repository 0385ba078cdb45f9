"""A tiny Gemma 4 with random weights, written by gguf-py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import quantize

from moeserve.models.sources.gguf.names import SPANS_SEE_AHEAD

HIDDEN, HEADS, WINDOW, EXPERTS, TOP_K, WIDTH, DENSE_WIDTH = 64, 2, 5, 4, 2, 32, 96
KV_HEADS = (2, 1)  # of the layer with a window, and of the one without
HEAD_DIMS = (32, 64)
VOCAB = 32


def write_gemma(
    path: Path, matrices: Type, rope_scaling: str | None = None, *, causal_pictures: bool = False
) -> Path:
    """matrices: a type of 32 columns a block at most; vectors and routers are float32. Its tokens are no text.
    rope_scaling: a type, with the factor 4. causal_pictures: as in the small models."""
    writer, rng = GGUFWriter(path, "gemma4"), np.random.default_rng(5)
    if causal_pictures:
        writer.add_bool(f"gemma4.{SPANS_SEE_AHEAD}", False)

    def add(name: str, values: npt.NDArray[np.float32], kind: Type = Type.F32) -> None:
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)

    def matrix(name: str, *shape: int) -> None:
        add(name, rng.normal(0, 1.5 / np.sqrt(shape[-1]), shape).astype(np.float32), matrices)

    def norm(name: str, size: int = HIDDEN) -> None:
        add(name, rng.normal(1, 0.2, size).astype(np.float32))

    matrix("token_embd", VOCAB, HIDDEN)
    norm("output_norm")
    norm("rope_freqs", HEAD_DIMS[1] // 2)
    for layer, (kv_heads, dim) in enumerate(zip(KV_HEADS, HEAD_DIMS, strict=True)):
        blk = f"blk.{layer}."
        matrix(f"{blk}attn_q", HEADS * dim, HIDDEN)
        for part in ("attn_k", "attn_v")[: 2 - layer]:  # without a window, v is made from k
            matrix(blk + part, kv_heads * dim, HIDDEN)
        matrix(f"{blk}attn_output", HIDDEN, HEADS * dim)
        norm(f"{blk}attn_q_norm", dim)
        norm(f"{blk}attn_k_norm", dim)
        for part in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_ffw_norm_1",
                     "pre_ffw_norm_2", "post_ffw_norm_2"):  # fmt: skip
            norm(blk + part)
        norm(f"{blk}layer_output_scale", 1)
        add(f"{blk}ffn_gate_inp", rng.normal(0, 1, (EXPERTS, HIDDEN)).astype(np.float32))
        for part, size in (("ffn_gate_inp.scale", HIDDEN), ("ffn_down_exps.scale", EXPERTS)):
            writer.add_tensor(blk + part, rng.normal(1, 0.2, size).astype(np.float32))
        for part, *shape in (("gate", DENSE_WIDTH, HIDDEN), ("up", DENSE_WIDTH, HIDDEN), ("down", HIDDEN, DENSE_WIDTH),
                             ("gate_exps", EXPERTS, WIDTH, HIDDEN), ("up_exps", EXPERTS, WIDTH, HIDDEN),
                             ("down_exps", EXPERTS, HIDDEN, WIDTH)):  # fmt: skip
            matrix(f"{blk}ffn_{part}", *shape)
    _add_metadata(writer)
    if rope_scaling is not None:
        writer.add_string("gemma4.rope.scaling.type", rope_scaling)
        writer.add_float32("gemma4.rope.scaling.factor", 4.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: GGUFWriter) -> None:
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(list(KV_HEADS))
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern([True, False])
    for suffix, dim, base in (("_swa", HEAD_DIMS[0], 1e4), ("", HEAD_DIMS[1], 1e6)):
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            writer.add_uint32(f"gemma4.{key}{suffix}", dim)
        writer.add_float32(f"gemma4.rope.freq_base{suffix}", base)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_feed_forward_length(WIDTH)
    writer.add_feed_forward_length(DENSE_WIDTH)
    writer.add_float32("gemma4.final_logit_softcapping", 30.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"{token}" for token in range(VOCAB)])
