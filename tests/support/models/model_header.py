"""Writes a GGUF of a real model's shape without its tensors' bytes, for `--load-format dummy`.

    python -m benchmarks.family_file qwen3-30b-a3b.gguf --shape qwen3-30b-a3b [--weights]

The types are llama.cpp's Q4_K_M mix. The vocabulary is made up: grammars and text mean nothing with such a file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.attention import AttentionShape
from moeserve.models.feed_forward import MoeShape
from moeserve.models.interface import LayerShape, ModelShape
from moeserve.models.qwen3moe.family import FAMILY
from moeserve.models.rope_scaling import RopeScaling
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.dummy import open_dummy
from moeserve.models.tensors import model_tensors
from moeserve.quantization import QUANT_TYPES


def qwen3moe(
    hidden_size: int = 2048,
    num_layers: int = 48,
    num_heads: int = 32,
    num_kv_heads: int = 4,
    head_dim: int = 128,
    num_experts: int = 128,
    top_k: int = 8,
    expert_width: int = 768,
    context_length: int = 40960,
    vocab_size: int = 151_936,
) -> ModelShape:
    """A Qwen3-MoE of these sizes; Qwen3-30B-A3B's where nothing is said."""
    layer = LayerShape(
        AttentionShape(num_heads, num_kv_heads, head_dim, qk_norm="head"),
        MoeShape(num_experts, top_k, expert_width, RouterOptions(scoring="softmax", normalize=True)),
    )
    return ModelShape(
        architecture=FAMILY.architecture,
        hidden_size=hidden_size,
        layers=(layer,) * num_layers,
        rms_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=RopeScaling(),
        context_length=context_length,
        vocab_size=vocab_size,
        tied_embeddings=False,
    )


QWEN3_30B_A3B = qwen3moe()

# GPT-2's letters for single bytes, which a server's tokenizer must have: printable ones stand for themselves.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = [chr(b if b in _PRINTABLE else 256 + _OTHERS.index(b)) for b in range(256)]


def q4_k_m(name: str, layers: int) -> Type:
    """A matrix's type in a Q4_K_M file: Q6_K for the head and, in half of the layers, for v and down."""
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


def write_header(
    path: Path,
    shape: ModelShape,
    type_of: Callable[[str, int], Type] = q4_k_m,
    chat_template: str | None = None,
) -> None:
    """type_of: of a matrix, from its name and the number of layers. chat_template: None: the model has none."""
    attention = shape.heads
    writer = GGUFWriter(path, shape.architecture)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_expert_feed_forward_length(shape.expert_width)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(
        [*BYTES, *(f"t{i}" for i in range(shape.vocab_size - len(BYTES)))][: shape.vocab_size]
    )
    writer.add_token_types([1] * shape.vocab_size)
    writer.add_token_merges(["t 0"] if shape.vocab_size > len(BYTES) else ["! !"])
    writer.add_eos_token_id(shape.vocab_size - 1)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, dimensions in model_tensors(shape).items():
        kind = Type.F32 if len(dimensions) == 1 else type_of(name, shape.num_layers)
        elements = 1
        for dimension in dimensions:
            elements *= dimension
        # gguf-py takes shapes in the file's order of bytes: the last dimension of a quantised type in bytes.
        stored = (*dimensions[:-1], QUANT_TYPES[kind].row_bytes(dimensions[-1]))
        dtype = "float32" if kind == Type.F32 else "uint8"
        writer.add_tensor_info(
            name,
            dimensions if kind == Type.F32 else stored,
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
