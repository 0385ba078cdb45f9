"""Hostile GGUF files: a small model that can be served, then changed in its values, its structure and its bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType, GGUFValueType

from tests.support.models.gguf_bytes import (
    TOKENS,
    Tensor,
    gguf_bytes,
    layer_dims,
    model_metadata,
    string,
    value,
)

# Multiples of 32, so that what a mutation leaves intact is computed with.
HIDDEN, FF, EXPERTS, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 64, 4, 2, 1, 32, 1

_COUNTS = (0, 1, 2, 31, 32, 33, 255, 65536, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_LONG = (0, 1, 7, 1 << 16, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 61, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_FINITE = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-12, 1e-6, 0.5, 1.0000001, 4.0, 1e6, 1e12, 3e38)
_FLOATS = (*_FINITE, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    "\0",
    "none",
    "linear",
    "yarn",
    "gpt2",
    "qwen2",
    "a b",
    " ",
    "  ",
    "x" * 70_000,
    "\u200b\x1b[2J",
)
_MERGES = ("", " ", "  ", "a", "a b c", "a  b", "ab ab", " a", "a ", "\0 \0", "a b", "é é", "\xff")
_BYTES = (0, 1, 8, 9, 0x7F, 0x80, 0xFF)


def base_metadata() -> dict[str, Any]:
    metadata = model_metadata(
        embedding_length=HIDDEN,
        block_count=LAYERS,
        context_length=64,
        expert_feed_forward_length=FF,
        attention__head_count=HEADS,
        attention__head_count_kv=KV_HEADS,
        attention__key_length=HEAD_DIM,
        expert_count=EXPERTS,
    )
    return metadata | {"tokenizer.chat_template": "{{ messages[0].content }}"}


def base_tensors() -> list[Tensor]:
    dims = layer_dims(HIDDEN, FF, EXPERTS, HEADS, KV_HEADS, HEAD_DIM)
    tensors = [Tensor("token_embd.weight", (HIDDEN, len(TOKENS))), Tensor("output_norm.weight", (HIDDEN,))]
    q8 = GGMLQuantizationType.Q8_0
    for part, shape in dims.items():
        kind = q8 if len(shape) > 1 and part != "ffn_gate_inp" else GGMLQuantizationType.F32
        tensors.append(Tensor(f"blk.0.{part}.weight", shape, kind))
    return _placed(tensors)


def _placed(tensors: list[Tensor]) -> list[Tensor]:
    """With offsets of their own, which stay when a mutation changes another tensor's shape."""
    placed, end = [], 0
    for tensor in tensors:
        placed.append(Tensor(tensor.name, tensor.dims, tensor.type, end))
        end += -(-tensor.nbytes // 64) * 64
    return placed


def write_hostile_gguf(folder: Path, rng: random.Random) -> Path:
    """A mutation of the base model, as a file or a split set; returns what to open."""
    metadata = dict(base_metadata())
    tensors = base_tensors()
    counts: dict[str, int] = {}
    raw: dict[str, bytes] = {}  # values that no Python value stands for
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 4))):
        rng.choice(_STRUCTURE)(rng, metadata, raw, tensors, counts)
    pairs = [(key, raw.get(key, b"") or value(item)) for key, item in metadata.items()]
    if rng.random() < 0.05:
        rng.shuffle(pairs)
    content = bytearray(gguf_bytes(pairs, tensors, **counts))
    content += _weights(rng)
    for _ in range(rng.choice((0, 0, 0, 0, 1, 3))):
        rng.choice(_CONTENT)(rng, content)
    name = "m.gguf"
    if rng.random() < 0.05:
        name = rng.choice(("m-00001-of-00001.gguf", "m-00001-of-00002.gguf", "m-00000-of-00001.gguf"))
        (folder / "m-00002-of-00002.gguf").write_bytes(content[: rng.randrange(len(content) + 1)])
    (folder / name).write_bytes(content)
    return folder / name if rng.random() < 0.95 else folder


# ---- the structure


def _change_value(rng: random.Random, metadata: dict[str, Any], raw: dict[str, bytes], *_: Any) -> None:
    """Another value of the same kind, in or out of its range."""
    key = rng.choice(sorted(metadata))
    old = metadata[key]
    if isinstance(old, int):
        metadata[key] = rng.choice((*_COUNTS, max(old - 1, 0), old + 1, old * 2, old // 2)) & 0xFFFFFFFF
    elif isinstance(old, float):
        metadata[key] = rng.choice(_FLOATS)
    elif isinstance(old, str):
        metadata[key] = rng.choice(_TEXTS)
    else:
        metadata[key] = _changed_list(rng, old)


def _changed_list(rng: random.Random, old: list[Any]) -> list[Any]:
    new = list(old)
    for _ in range(rng.choice((1, 1, 5))):
        at = rng.randrange(len(new))
        match rng.randrange(5):
            case 0 if len(new) > 1:
                del new[at]
            case 1:
                new.insert(at, new[rng.randrange(len(new))])
            case 2:
                new[at] = new[rng.randrange(len(new))]
            case _:
                hostile = rng.choice((*_MERGES, *_TEXTS)) if isinstance(old[0], str) else rng.randrange(-9, 9)
                new[at] = hostile
    return new


def _change_type(rng: random.Random, metadata: dict[str, Any], raw: dict[str, bytes], *_: Any) -> None:
    """A value of another type, or none at all."""
    key = rng.choice(sorted(metadata))
    kind = rng.randrange(14)
    length = rng.choice((*_LONG, *range(4)))
    raw[key] = rng.choice(
        (
            struct.pack("<Iq", GGUFValueType.INT64, rng.choice((-1, 0, 1, 32, 1 << 40))),
            struct.pack("<IQ", GGUFValueType.UINT64, rng.choice(_LONG)),
            struct.pack("<Id", GGUFValueType.FLOAT64, rng.choice(_FLOATS)),
            struct.pack("<I?", GGUFValueType.BOOL, True),
            struct.pack("<I", GGUFValueType.STRING) + string(rng.choice(_TEXTS)),
            struct.pack("<IIQ", GGUFValueType.ARRAY, kind, length) + rng.randbytes(rng.choice((0, 8, 64))),
            struct.pack("<I", rng.choice((13, 99, 1 << 31))) + bytes(8),
            value([1, 2, 3]),
            value(["a", "b"]),
            value([True] * len(TOKENS)),
            value([1] * len(TOKENS)),
            value(["x"] * len(TOKENS)),
        )
    )


def _drop_key(rng: random.Random, metadata: dict[str, Any], *_: Any) -> None:
    del metadata[rng.choice(sorted(metadata))]


def _add_key(rng: random.Random, metadata: dict[str, Any], *_: Any) -> None:
    """Settings that a file may have: RoPE's scaling, the alignment, split sets, ids of tokens."""
    options: dict[str, tuple[Any, ...]] = {
        "qwen3moe.rope.scaling.type": ("none", "linear", "yarn", "longrope", ""),
        "qwen3moe.rope.scaling.factor": _FLOATS,
        "qwen3moe.rope.scaling.original_context_length": _COUNTS,
        "qwen3moe.rope.scaling.yarn_beta_fast": _FLOATS,
        "qwen3moe.rope.scaling.yarn_beta_slow": _FLOATS,
        "qwen3moe.rope.scaling.yarn_attn_factor": _FLOATS,
        "qwen3moe.rope.scaling.attn_factor": _FLOATS,
        "qwen3moe.rope.freq_base": _FLOATS,
        "qwen3moe.vocab_size": (len(TOKENS), *_COUNTS),
        "general.alignment": (0, 1, 3, 4, 8, 16, 32, 64, 1 << 20, 1 << 21, 1 << 31),
        "split.count": _COUNTS,
        "split.no": _COUNTS,
        "split.tensors.count": (len(base_tensors()), *_COUNTS),
        "tokenizer.ggml.bos_token_id": _COUNTS,
        "tokenizer.ggml.padding_token_id": _COUNTS,
        "tokenizer.ggml.add_bos_token": (True, False, 1),
        "tokenizer.normalizer": ("NFC", "none", ""),
        "tokenizer.generation_end_ids": ([0, 1], [-1], [1 << 30], [5] * 100_000),
        "tokenizer.config_end_ids": ([0, 1], [-1], [1 << 30]),
    }
    for _change in range(rng.choice((1, 2, 4))):
        key = rng.choice(sorted(options))
        metadata[key] = rng.choice(options[key])
    if rng.random() < 0.5:
        metadata["qwen3moe.rope.scaling.type"] = rng.choice(("linear", "yarn"))
        metadata["qwen3moe.rope.scaling.factor"] = rng.choice((1.0, 4.0, 1024.0))


def _change_tensor(rng: random.Random, *rest: Any) -> None:
    tensors: list[Tensor] = rest[2]
    at = rng.randrange(len(tensors))
    old = tensors[at]
    name, dims, kind, offset = old.name, list(old.dims), old.type, old.offset
    match rng.randrange(6):
        case 0:
            name = rng.choice(("", "x" * 64, "x" * 65, "blk.0.", tensors[0].name, "output.weight", "\0"))
        case 1:
            dims.insert(rng.randrange(len(dims) + 1), rng.choice((*_LONG, *_COUNTS)))
            del dims[: len(dims) - len(old.dims)]
        case 2:
            dims = rng.choice(([], dims[::-1], [*dims, 1], dims[:-1], [1] * 5, dims * 2))
        case 3:
            kind = rng.choice((*range(42), 250, (1 << 32) - 1))
        case 4:
            offset = rng.choice((*_LONG, 8, 32, 64, 4096))
        case 5:
            del tensors[at]
            return
    tensors[at] = Tensor(name, tuple(dims), kind, offset)


def _add_tensor(rng: random.Random, *rest: Any) -> None:
    tensors: list[Tensor] = rest[2]
    vocab = len(TOKENS)
    tensors.insert(rng.randrange(len(tensors)), Tensor("output.weight", (HIDDEN, rng.choice((vocab, 1)))))


def _lie_about_counts(rng: random.Random, *rest: Any) -> None:
    counts: dict[str, int] = rest[3]
    counts[rng.choice(("num_tensors", "num_keys"))] = rng.choice((*_LONG, *_COUNTS, *range(32)))


_STRUCTURE: tuple[Callable[..., None], ...] = (
    _change_value,
    _change_value,
    _change_value,
    _change_type,
    _drop_key,
    _add_key,
    _add_key,
    _change_tensor,
    _change_tensor,
    _add_tensor,
    _lie_about_counts,
)


# ---- the bytes


def _weights(rng: random.Random) -> bytes:
    """The bytes of all tensors: small numbers, or arbitrary bytes, infinities and NaN among them."""
    last = base_tensors()[-1]
    assert last.offset is not None
    size = last.offset + last.nbytes
    return struct.pack("<e", 0.01) * (size // 2) if rng.random() < 0.5 else rng.randbytes(size)


def _flip(rng: random.Random, content: bytearray) -> None:
    header = min(len(content), 12_000)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if header:
            content[rng.randrange(header)] = rng.choice((*_BYTES, rng.randrange(256)))


def _overwrite_length(rng: random.Random, content: bytearray) -> None:
    if len(content) > 64:
        at = rng.randrange(min(len(content) - 8, 12_000))
        content[at : at + 8] = struct.pack("<Q", rng.choice(_LONG))


def _truncate(rng: random.Random, content: bytearray) -> None:
    del content[rng.randrange(len(content) + 1) :]


def _extend(rng: random.Random, content: bytearray) -> None:
    content += rng.randbytes(rng.choice((1, 31, 4096)))


def _copy_within(rng: random.Random, content: bytearray) -> None:
    if len(content) > 256:
        source, target = rng.randrange(len(content) - 128), rng.randrange(len(content))
        content[target:target] = content[source : source + rng.randrange(128)]


def _cut_out(rng: random.Random, content: bytearray) -> None:
    if content:
        at = rng.randrange(len(content))
        del content[at : at + rng.randrange(64)]


_CONTENT: tuple[Callable[[random.Random, bytearray], None], ...] = (
    _flip,
    _flip,
    _overwrite_length,
    _truncate,
    _extend,
    _copy_within,
    _cut_out,
)
