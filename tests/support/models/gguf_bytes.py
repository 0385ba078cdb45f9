"""Writes small GGUF files byte by byte, right or wrong as a test wants them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from moeserve.quantization import QUANT_TYPES
from moeserve.tokenizer.vocabulary import byte_alphabet

T = GGUFValueType
_FORMATS = {T.UINT16: "<H", T.UINT32: "<I", T.INT32: "<i", T.FLOAT32: "<f", T.BOOL: "<?", T.UINT64: "<Q"}

_PATTERN = bytes(at * 7 % 251 for at in range(251))  # of the tensors' bytes


@dataclass(frozen=True)
class Tensor:
    """`dims` as in the file, innermost first. `offset` None: right after the tensor before."""

    name: str
    dims: tuple[int, ...]
    type: int = GGMLQuantizationType.F32
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        if self.type in QUANT_TYPES:
            row = QUANT_TYPES[self.type]
            block, size = row.block_columns, row.block_bytes
        else:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.type)]
        total = size
        for dimension in self.dims:
            total *= dimension
        return total // block


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type and value: bool, int (uint32), float (float32), str, or a list of one of int (int32), float (float32), str,
    bool."""
    if isinstance(item, bool):
        return struct.pack("<I?", T.BOOL, item)
    if isinstance(item, int):
        return struct.pack("<II", T.UINT32, item)
    if isinstance(item, float):
        return struct.pack("<If", T.FLOAT32, item)
    if isinstance(item, str):
        return struct.pack("<I", T.STRING) + string(item)
    kinds = ((str | bytes, T.STRING), (bool, T.BOOL), (float, T.FLOAT32), (int, T.INT32))
    kind = next(kind for types, kind in kinds if isinstance(item[0], types))
    body = b"".join(string(x) if kind == T.STRING else struct.pack(_FORMATS[kind], x) for x in item)
    return struct.pack("<IIQ", T.ARRAY, kind, len(item)) + body


def gguf_bytes(
    metadata: Mapping[str, Any] | Sequence[tuple[str | bytes, bytes]],
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file. `metadata` maps keys to Python values, or is a list of keys and encoded values."""
    pairs = [(k, value(v)) for k, v in metadata.items()] if isinstance(metadata, Mapping) else list(metadata)
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_keys is None else num_keys,
    )
    out = bytearray(b"GGUF" + struct.pack("<IQQ", version, *counts))
    for key, encoded in pairs:
        out += string(key) + encoded
    end = 0
    for tensor in tensors:
        offset = end if tensor.offset is None else tensor.offset
        out += string(tensor.name) + struct.pack("<I", len(tensor.dims))
        out += b"".join(struct.pack("<Q", dimension) for dimension in tensor.dims)
        out += struct.pack("<IQ", tensor.type, offset)
        known = (tensor.type in GGML_QUANT_SIZES or tensor.type in QUANT_TYPES) and tensor.offset is None
        end = -(-(end + (tensor.nbytes if known else 0)) // alignment) * alignment
    out += bytes(-len(out) % alignment)
    size = min(end, 1 << 20)
    return bytes(out) + (_PATTERN * (size // len(_PATTERN) + 1))[:size]


TOKENS = [*byte_alphabet(), "ab", "abc", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "[PAD]"]
TOKEN_TYPES = [1] * 258 + [3, 3, 3, 4, 5]
MERGES = ["a b", "ab c"]

# in, out and the number of experts all differ: the wrong order of dimensions cannot pass for the right one.
HIDDEN, FF, EXPERTS, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 64, 3, 2, 1, 8, 2


def model_metadata(**changes: Any) -> dict[str, Any]:
    """A complete tiny qwen3moe's; `changes` by suffix with "__" for ".", None removes a key."""
    metadata: dict[str, Any] = {
        "general.architecture": "qwen3moe",
        "qwen3moe.context_length": 2048,
        "qwen3moe.embedding_length": HIDDEN,
        "qwen3moe.block_count": LAYERS,
        "qwen3moe.expert_feed_forward_length": FF,
        "qwen3moe.attention.head_count": HEADS,
        "qwen3moe.attention.head_count_kv": KV_HEADS,
        "qwen3moe.attention.key_length": HEAD_DIM,
        "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3moe.rope.freq_base": 1e6,
        "qwen3moe.expert_count": EXPERTS,
        "qwen3moe.expert_used_count": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TOKEN_TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>"),
    }
    for suffix, changed in changes.items():
        key = suffix.replace("__", ".")
        full = key if key.startswith(("general.", "tokenizer.", "split.")) else f"qwen3moe.{key}"
        if changed is None:
            del metadata[full]
        else:
            metadata[full] = changed
    return metadata


def layer_dims(
    hidden: int, ff: int, experts: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a layer, innermost dimension first."""
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    return {
        "attn_norm": (hidden,),
        "attn_q": (hidden, q_width),
        "attn_k": (hidden, kv_width),
        "attn_v": (hidden, kv_width),
        "attn_output": (q_width, hidden),
        "attn_q_norm": (head_dim,),
        "attn_k_norm": (head_dim,),
        "ffn_norm": (hidden,),
        "ffn_gate_inp": (hidden, experts),
        "ffn_gate_exps": (hidden, ff, experts),
        "ffn_up_exps": (hidden, ff, experts),
        "ffn_down_exps": (ff, hidden, experts),
    }


def model_tensors() -> list[Tensor]:
    dims = layer_dims(HIDDEN, FF, EXPERTS, HEADS, KV_HEADS, HEAD_DIM)
    tensors = [Tensor("token_embd.weight", (HIDDEN, len(TOKENS))), Tensor("output_norm.weight", (HIDDEN,))]
    for layer in range(LAYERS):
        tensors += [Tensor(f"blk.{layer}.{part}.weight", d) for part, d in dims.items()]
    return tensors
