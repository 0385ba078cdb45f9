"""Writes a GGUF of a real model's shape without its tensors' bytes, for `--load-format dummy`.

    python -m benchmarks.header qwen3-30b-a3b.gguf
    python -m benchmarks.header 12-layers.gguf --layers 12 --weights    # a whole file, with random weights

The types are llama.cpp's Q4_K_M mix. The vocabulary is made up: grammars and text mean nothing with such a file.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Type

from moeserve.models.gguf import names as n
from moeserve.models.gguf.dummy import open_dummy
from moeserve.models.qwen3moe.config import ARCHITECTURE, Qwen3MoeConfig, RopeScaling
from moeserve.quantization import QUANT_TYPES

QWEN3_30B_A3B = Qwen3MoeConfig(
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    top_k=8,
    expert_ff=768,
    rms_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=RopeScaling(),
    context_length=40960,
    vocab_size=151_936,
    tied_embeddings=False,
)


# GPT-2's letters for single bytes, which a server's tokenizer must have: printable ones stand for themselves.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = [chr(b if b in _PRINTABLE else 256 + _OTHERS.index(b)) for b in range(256)]


def q4_k_m(name: str, layers: int) -> Type:
    """Of a matrix: Q6_K for the head and, in half of the layers, for v and down."""
    if name == n.OUTPUT:
        return Type.Q6_K
    if name.endswith(f"{n.FFN_GATE_INP}.weight"):
        return Type.F32
    if not name.endswith((f"{n.ATTN_V}.weight", f"{n.FFN_DOWN_EXPS}.weight")):
        return Type.Q4_K
    layer = int(name.split(".")[1])
    eighth = layers // 8
    has_more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    return Type.Q6_K if has_more else Type.Q4_K


def write_header(path: Path, c: Qwen3MoeConfig, type_of: Callable[[str, int], Type] = q4_k_m) -> None:
    """type_of: of a matrix, from its name and the number of layers."""
    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_context_length(c.context_length)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_expert_feed_forward_length(c.expert_ff)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.top_k)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*BYTES, *(f"t{i}" for i in range(c.vocab_size - len(BYTES)))][: c.vocab_size])
    writer.add_token_types([1] * c.vocab_size)
    writer.add_token_merges(["t 0"] if c.vocab_size > len(BYTES) else ["! !"])
    writer.add_eos_token_id(c.vocab_size - 1)
    for name, shape in c.expected_shapes().items():
        kind = Type.F32 if len(shape) == 1 else type_of(name, c.num_layers)
        elements = 1
        for dimension in shape:
            elements *= dimension
        # gguf-py takes shapes in the file's order of bytes: the last dimension of a quantised type in bytes.
        stored = (*shape[:-1], QUANT_TYPES[kind].row_bytes(shape[-1]))
        dtype = "float32" if kind == Type.F32 else "uint8"
        writer.add_tensor_info(
            name,
            shape if kind == Type.F32 else stored,
            np.dtype(dtype),
            QUANT_TYPES[kind].row_bytes(elements),
            raw_dtype=kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def write_weights(path: Path) -> None:
    """The weights of `--load-format dummy`, behind a header."""
    source = open_dummy(path)
    with path.open("r+b") as file:
        for name, tensor in source.tensors.items():
            file.seek(tensor.offset)
            file.write(source.data(name).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, default=QWEN3_30B_A3B.num_layers)
    parser.add_argument("--weights", action="store_true")
    args = parser.parse_args()
    write_header(args.output, dataclasses.replace(QWEN3_30B_A3B, num_layers=args.layers))
    if args.weights:
        write_weights(args.output)


if __name__ == "__main__":
    main()
