#!/usr/bin/env python3
"""Writes a GGUF of a published model's real shape with few layers and random weights, for benchmarks.

    python -m benchmarks.family_file OUT.gguf --shape gpt-oss-20b|qwen3.6-35b-a3b|glm-4.5-air [--layers N] [--header]
    python -m benchmarks.family_file OUT.gguf --shape qwen3-30b-a3b|qwen3-235b-a22b [--layers N] [--weights]
        [--experts TYPE[,TYPE]] [--traced TOKENS]

With --header the first writes a header without tensors' bytes, for `--load-format dummy`; the second does, unless
--weights is given. --experts: all experts' matrices are of this type, IQ2_XXS for example; with two types, gate and up
are of the first and down of the second. --traced: with weights whose routing has the locality of published traces, in
a greedy answer of up to TOKENS tokens (`tests/support/models/traced_weights.py`).

Names, metadata and types are those of llama.cpp's converter and quantiser (MXFP4 with Q8_0 for gpt-oss, Q4_K_M for the
others, with its fallbacks for rows that are no multiple of 256). The vocabulary is cut in proportion to the layers, so
that the output matrix has the share of a step that it has in the whole model. The tokens mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf.constants import GGMLQuantizationType as Type
from gguf.constants import TokenType
from gguf.quants import quantize

from moeserve.models.interface import ModelShape
from moeserve.placement.expert_cache.generate import LOCAL, generate
from tests.support.models.model_header import QWEN3_30B_A3B, q4_k_m, qwen3moe, write_header, write_weights
from tests.support.models.traced_weights import traced_type, write_routing

QWEN3 = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-235b-a22b": qwen3moe(4096, num_layers=94, num_heads=64, expert_width=1536),
}

POOL_BLOCKS = 1 << 16  # random blocks of a type, of which its tensors are made
# Of a K-quant's half floats: (byte, magnitude). Random codes then have a mean of about 0 and a deviation of about 0.02.
HALVES = {
    Type.Q4_K: ((0, 1.2e-4), (2, 0.9e-3)),
    Type.Q5_K: ((0, 0.6e-4), (2, 0.93e-3)),
    Type.Q6_K: ((208, 1.5e-5),),
}
FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}  # of llama.cpp's quantiser, for rows of other widths


class File:
    def __init__(self, path: str, architecture: str, *, is_header: bool = False) -> None:
        """is_header: no tensor's bytes are written."""
        self.is_header = is_header
        self.writer = GGUFWriter(path, architecture)
        self._random = np.random.default_rng(0)
        self._pools: dict[Type, npt.NDArray[np.uint8]] = {}

    def matrix(self, name: str, kind: Type, *shape: int, std: float | None = None) -> None:
        """shape: row-major, columns last; std: of floats, 1 / sqrt(columns) by default."""
        if self.is_header:
            self._declare(name, kind, *shape)
            return
        if kind is Type.F32:
            scale = std or 1 / np.sqrt(shape[-1])
            self.writer.add_tensor(name, self._random.normal(0, scale, shape).astype(np.float32))
            return
        if shape[-1] % GGML_QUANT_SIZES[kind][0]:
            kind = FALLBACK[kind]
        columns, size = GGML_QUANT_SIZES[kind]
        pool = self._pool(kind)
        count = int(np.prod(shape)) // columns
        blocks = np.concatenate([np.roll(pool, 7 * i, axis=0) for i in range(-(-count // len(pool)))])[:count]
        data = blocks.reshape(*shape[:-1], shape[-1] // columns * size)
        self.writer.add_tensor(name, data, raw_dtype=kind)

    def _declare(self, name: str, kind: Type, *shape: int) -> None:
        if kind is not Type.F32 and shape[-1] % GGML_QUANT_SIZES[kind][0]:
            kind = FALLBACK[kind]
        columns, size = GGML_QUANT_SIZES[kind]
        stored = shape if kind is Type.F32 else (*shape[:-1], shape[-1] // columns * size)
        dtype = np.dtype(np.float32 if kind is Type.F32 else np.uint8)
        self.writer.add_tensor_info(
            name, stored, dtype, int(np.prod(shape)) // columns * size, raw_dtype=kind
        )

    def vector(self, name: str, size: int, mean: float, std: float) -> None:
        if self.is_header:
            self._declare(name, Type.F32, size)
            return
        self.writer.add_tensor(name, self._random.normal(mean, std, size).astype(np.float32))

    def _pool(self, kind: Type) -> npt.NDArray[np.uint8]:
        if kind not in self._pools:
            columns, size = GGML_QUANT_SIZES[kind]
            if kind in HALVES:
                blocks = self._random.integers(0, 256, (POOL_BLOCKS, size), np.uint8)
                for offset, magnitude in HALVES[kind]:
                    scales = magnitude * self._random.uniform(0.5, 1.5, POOL_BLOCKS)
                    blocks[:, offset : offset + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
            else:
                blocks = quantize(
                    self._random.normal(0, 0.02, (POOL_BLOCKS, columns)).astype(np.float32), kind
                )
            self._pools[kind] = blocks.reshape(POOL_BLOCKS, size)
        return self._pools[kind]


def takes_more_bits(layer: int, layers: int) -> bool:
    """Which layers' down and v matrices Q4_K_M stores in Q6_K."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def experts(file: File, p: str, hidden: int, count: int, width: int, kind: Type, down: Type) -> None:
    file.matrix(p + "ffn_gate_inp.weight", Type.F32, count, hidden, std=3 / np.sqrt(hidden))
    file.matrix(p + "ffn_gate_exps.weight", kind, count, width, hidden)
    file.matrix(p + "ffn_up_exps.weight", kind, count, width, hidden)
    file.matrix(p + "ffn_down_exps.weight", down, count, hidden, width)


def feed_forward(file: File, p: str, suffix: str, hidden: int, width: int, down: Type) -> None:
    file.matrix(f"{p}ffn_gate{suffix}.weight", Type.Q4_K, width, hidden)
    file.matrix(f"{p}ffn_up{suffix}.weight", Type.Q4_K, width, hidden)
    file.matrix(f"{p}ffn_down{suffix}.weight", down, hidden, width)


def decoder(file: File, layers: int, hidden: int, heads: tuple[int, int, int], rope_base: float) -> None:
    """heads: (of q, of k and v, dimension)."""
    w = file.writer
    w.add_block_count(layers)
    w.add_context_length(131072)
    w.add_embedding_length(hidden)
    w.add_head_count(heads[0])
    w.add_head_count_kv(heads[1])
    w.add_key_length(heads[2])
    w.add_value_length(heads[2])
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(rope_base)


def add_experts(file: File, count: int, used: int, width: int) -> None:
    file.writer.add_expert_count(count)
    file.writer.add_expert_used_count(used)
    file.writer.add_expert_feed_forward_length(width)


def gpt_oss(file: File, layers: int) -> int:
    """Returns hidden, as the others do."""
    hidden, heads, count, width = 2880, (64, 8, 64), 32, 2880
    decoder(file, layers, hidden, heads, 150000.0)
    add_experts(file, count, 4, width)
    w = file.writer
    w.add_feed_forward_length(width)
    w.add_sliding_window(128)
    w.add_rope_dimension_count(64)
    w.add_string("gpt-oss.rope.scaling.type", "yarn")
    w.add_float32("gpt-oss.rope.scaling.factor", 32.0)
    w.add_uint32("gpt-oss.rope.scaling.original_context_length", 4096)
    q, kv = heads[0] * heads[2], heads[1] * heads[2]
    for p in (f"blk.{i}." for i in range(layers)):
        for norm in ("attn_norm", "post_attention_norm"):
            file.vector(f"{p}{norm}.weight", hidden, 1, 0.1)
        for part, rows, columns in (
            ("attn_q", q, hidden),
            ("attn_k", kv, hidden),
            ("attn_v", kv, hidden),
            ("attn_output", hidden, q),
        ):
            file.matrix(f"{p}{part}.weight", Type.Q8_0, rows, columns)
            file.vector(f"{p}{part}.bias", rows, 0, 0.1)
        file.vector(p + "attn_sinks.weight", heads[0], 1, 1)
        experts(file, p, hidden, count, width, Type.MXFP4, Type.MXFP4)
        file.vector(p + "ffn_gate_inp.bias", count, 0, 0.1)
        for part, rows in (("gate", width), ("up", width), ("down", hidden)):
            file.matrix(f"{p}ffn_{part}_exps.bias", Type.F32, count, rows, std=0.1)
    return hidden


def qwen36(file: File, layers: int) -> int:
    hidden, heads, count, width = 2048, (16, 2, 256), 256, 512
    key_heads, value_heads, size = 16, 32, 128
    decoder(file, layers + 1, hidden, heads, 1e7)
    add_experts(file, count, 8, width)
    w, a = file.writer, "qwen35moe."
    w.add_uint32(a + "expert_shared_feed_forward_length", width)
    w.add_rope_dimension_count(64)
    w.add_array(a + "rope.dimension_sections", [11, 11, 10, 0])
    for key, value in (
        ("conv_kernel", 4),
        ("state_size", size),
        ("group_count", key_heads),
        ("time_step_rank", value_heads),
        ("inner_size", value_heads * size),
    ):
        w.add_uint32(f"{a}ssm.{key}", value)
    w.add_uint32(a + "full_attention_interval", 4)
    q, kv = heads[0] * heads[2], heads[1] * heads[2]
    inner, channels = value_heads * size, (2 * key_heads + value_heads) * size
    w.add_uint32(a + "nextn_predict_layers", 1)
    # The last one is the layer of the next-token block.
    for i in range(layers + 1):
        p, more = f"blk.{i}.", Type.Q6_K if takes_more_bits(i, layers) else Type.Q4_K
        for norm in ("attn_norm", "post_attention_norm"):
            file.vector(f"{p}{norm}.weight", hidden, 1, 0.1)
        if i % 4 == 3 or i == layers:
            file.matrix(p + "attn_q.weight", Type.Q4_K, 2 * q, hidden)
            file.matrix(p + "attn_k.weight", Type.Q4_K, kv, hidden)
            file.matrix(p + "attn_v.weight", more, kv, hidden)
            file.matrix(p + "attn_output.weight", Type.Q4_K, hidden, q)
            file.vector(p + "attn_q_norm.weight", heads[2], 1, 0.1)
            file.vector(p + "attn_k_norm.weight", heads[2], 1, 0.1)
        else:
            file.matrix(p + "attn_qkv.weight", Type.Q5_K, channels, hidden)
            file.matrix(p + "attn_gate.weight", Type.Q4_K, inner, hidden)
            file.matrix(p + "ssm_alpha.weight", Type.Q4_K, value_heads, hidden)
            file.matrix(p + "ssm_beta.weight", Type.Q4_K, value_heads, hidden)
            file.matrix(p + "ssm_conv1d.weight", Type.F32, channels, 4)
            file.vector(p + "ssm_a", value_heads, -1, 0.2)
            file.vector(p + "ssm_dt.bias", value_heads, -1, 1)
            file.vector(p + "ssm_norm.weight", size, 1, 0.1)
            file.matrix(p + "ssm_out.weight", Type.Q4_K, hidden, inner)
        experts(file, p, hidden, count, width, Type.Q4_K, more)
        file.vector(p + "ffn_gate_inp_shexp.weight", hidden, 0, 0.02)
        feed_forward(file, p, "_shexp", hidden, width, more)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        file.vector(f"{p}nextn.{norm}.weight", hidden, 1, 0.1)
    file.matrix(p + "nextn.eh_proj.weight", Type.Q4_K, hidden, 2 * hidden)
    return hidden


def glm_air(file: File, layers: int) -> int:
    hidden, heads, count, width, dense = 4096, (96, 8, 128), 128, 1408, 10944
    decoder(file, layers, hidden, heads, 1e6)
    add_experts(file, count, 8, width)
    w = file.writer
    w.add_feed_forward_length(dense)
    w.add_rope_dimension_count(64)
    w.add_expert_shared_count(1)
    w.add_leading_dense_block_count(1)
    w.add_uint32("glm4moe.expert_gating_func", 2)
    w.add_expert_weights_scale(1.0)
    w.add_expert_weights_norm(True)
    q, kv = heads[0] * heads[2], heads[1] * heads[2]
    for i in range(layers):
        p, more = f"blk.{i}.", Type.Q6_K if takes_more_bits(i, layers) else Type.Q4_K
        for norm in ("attn_norm", "post_attention_norm"):
            file.vector(f"{p}{norm}.weight", hidden, 1, 0.1)
        for part, rows, kind in (("q", q, Type.Q4_K), ("k", kv, Type.Q4_K), ("v", kv, more)):
            file.matrix(f"{p}attn_{part}.weight", kind, rows, hidden)
            file.vector(f"{p}attn_{part}.bias", rows, 0, 0.1)
        file.matrix(p + "attn_output.weight", Type.Q4_K, hidden, q)
        if i == 0:
            feed_forward(file, p, "", hidden, dense, more)
        else:
            experts(file, p, hidden, count, width, Type.Q4_K, more)
            file.vector(p + "exp_probs_b.bias", count, 0, 0.1)
            feed_forward(file, p, "_shexp", hidden, width, more)
    return hidden


@dataclass(frozen=True)
class Shape:
    architecture: str
    write: Callable[[File, int], int]
    layers: int  # of the published model, and of the file by default
    few: int
    vocabulary: int  # of the published model
    head: Type
    embedding: Type


SHAPES = {
    "gpt-oss-20b": Shape("gpt-oss", gpt_oss, 24, 6, 201088, Type.Q8_0, Type.Q8_0),
    "qwen3.6-35b-a3b": Shape("qwen35moe", qwen36, 40, 8, 248320, Type.Q6_K, Type.Q4_K),
    "glm-4.5-air": Shape("glm4moe", glm_air, 46, 4, 151552, Type.Q6_K, Type.Q4_K),
}


def write(path: str, shape: Shape, layers: int, *, is_header: bool = False) -> None:
    file = File(path, shape.architecture, is_header=is_header)
    file.writer.add_file_type(15)
    file.writer.add_quantization_version(2)
    hidden = shape.write(file, layers)
    tokens = shape.vocabulary * layers // shape.layers // 64 * 64
    file.matrix("token_embd.weight", shape.embedding, tokens, hidden)
    file.vector("output_norm.weight", hidden, 1, 0.1)
    file.matrix("output.weight", shape.head, tokens, hidden)
    add_vocabulary(file.writer, tokens)
    file.writer.write_header_to_file()
    file.writer.write_kv_data_to_file()
    if is_header:
        file.writer.write_ti_data_to_file()
    else:
        file.writer.write_tensors_to_file()
    file.writer.close()


def add_vocabulary(writer: GGUFWriter, size: int) -> None:
    """The 256 bytes as GPT-2 writes them, an end of text, and tokens without a meaning."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokens = [letters[byte] for byte in range(256)] + ["<|endoftext|>", letters[97] + letters[98]]
    types = [int(TokenType.NORMAL)] * 256 + [int(TokenType.CONTROL), int(TokenType.NORMAL)]
    while len(tokens) < size:
        tokens.append(f"a{len(tokens)}")
        types.append(int(TokenType.NORMAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{letters[97]} {letters[98]}"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    writer.add_add_bos_token(False)


def type_of(experts: str | None) -> Callable[[str, int], Type]:
    """Q4_K_M's types, but for the experts' matrices where a type is named, or one of gate and up and one of down.
    KeyError for one that is not known."""
    if experts is None:
        return q4_k_m
    kinds = [Type[name] for name in experts.split(",")]

    def kind_of(name: str, layers: int) -> Type:
        if not name.endswith("_exps.weight"):
            return q4_k_m(name, layers)
        return kinds[-1] if name.endswith("down_exps.weight") else kinds[0]

    return kind_of


def write_traced(path: Path, shape: ModelShape) -> None:
    """The vocabulary has a token for each of the trace."""
    of_trace = {"layers": shape.num_layers, "experts": shape.num_experts, "top_k": shape.top_k}
    write_header(path, shape, traced_type)
    write_weights(path)
    write_routing(path, shape, generate(LOCAL, "published", tokens=shape.vocab_size, **of_trace))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("--shape", choices=[*SHAPES, *QWEN3], required=True)
    parser.add_argument("--layers", type=int, help="default: a few, of Qwen3 all")
    parser.add_argument(
        "--weights", action="store_true", help="Qwen3: with random weights, not a header alone"
    )
    parser.add_argument(
        "--header", action="store_true", help="without weights; Qwen3: always, but for --weights"
    )
    parser.add_argument(
        "--experts", metavar="TYPE", help="Qwen3: of all experts' matrices; A,B: of gate and up, and of down"
    )
    parser.add_argument(
        "--traced", type=int, metavar="TOKENS", help="Qwen3: as many tokens and the routing of a trace"
    )
    args = parser.parse_args()
    if args.shape in QWEN3:
        shape = QWEN3[args.shape]
        shape = replace(shape, layers=shape.layers[: args.layers])
        if args.traced:
            write_traced(Path(args.out), replace(shape, vocab_size=args.traced))
            return
        write_header(Path(args.out), shape, type_of(args.experts))
        if args.weights:
            write_weights(Path(args.out))
        return
    few = SHAPES[args.shape]
    write(args.out, few, args.layers or few.few, is_header=args.header)


if __name__ == "__main__":
    main()
