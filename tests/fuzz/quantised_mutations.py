"""GGUF files of every quantised type, of random bytes: scales that are no numbers, indices and digits of any kind."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from moeserve.quantization import QUANT_TYPES
from tests.fuzz.gguf_mutations import EXPERTS, HEAD_DIM, KV_HEADS, base_metadata
from tests.support.models.gguf_bytes import TOKENS, Tensor, gguf_bytes, layer_dims

WIDTH = 256  # of hidden vectors and experts: a super-block
TYPES = [row.number for row in QUANT_TYPES.values() if row.is_quantised and row.in_gguf]


def write_hostile_quants(folder: Path, rng: random.Random) -> Path:
    """A file whose matrices are of random types; in one of three a tensor's shape or type is a lie."""
    heads = WIDTH // HEAD_DIM
    metadata = base_metadata() | {
        "qwen3moe.embedding_length": WIDTH,
        "qwen3moe.expert_feed_forward_length": WIDTH,
        "qwen3moe.attention.head_count": heads,
    }
    shapes = {"token_embd": (WIDTH, len(TOKENS)), "output_norm": (WIDTH,)}
    for part, dims in layer_dims(WIDTH, WIDTH, EXPERTS, heads, KV_HEADS, HEAD_DIM).items():
        shapes[f"blk.0.{part}"] = dims
    tensors, end = [], 0
    for name, dims in shapes.items():
        is_matrix = len(dims) > 1 and "ffn_gate_inp" not in name
        tensors.append(Tensor(f"{name}.weight", dims, rng.choice(TYPES) if is_matrix else 0, end))
        end += -(-tensors[-1].nbytes // 32) * 32
    if rng.random() < 1 / 3:
        at = rng.randrange(len(tensors))
        tensors[at] = _lying(rng, tensors[at])
    path = folder / "m.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors) + rng.randbytes(end))
    return path


def _lying(rng: random.Random, tensor: Tensor) -> Tensor:
    if rng.random() < 0.5:
        return replace(tensor, type=rng.choice((*TYPES, 36, 43, 137, 240)))
    return replace(tensor, dims=tuple(rng.choice((size, size - 1, size + 32, 1)) for size in tensor.dims))
