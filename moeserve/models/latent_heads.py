"""Reads the sizes of latent attention."""

from __future__ import annotations

from moeserve.models.latent import LatentAttentionShape
from moeserve.models.shape_reader import ShapeReader


def latent_attention(reader: ShapeReader, num_heads: int) -> LatentAttentionShape:
    """Reads the attention of `num_heads` heads from llama.cpp's keys for DeepSeek-V2 and its successors. Raises
    ModelError."""
    rank = reader.integer("attention.kv_lora_rank", 1, 1024)
    rotary = reader.integer("rope.dimension_count", 2, 1024)
    if rotary % 2:
        raise reader.error("rope.dimension_count", f"is {rotary}; only an even number is supported")
    reader.only("attention.key_length", rank + rotary)
    key_length = reader.integer("attention.key_length_mla", rotary + 1, 2048)
    return LatentAttentionShape(
        num_heads=num_heads,
        q_rank=reader.integer("attention.q_lora_rank", 0, 1 << 16, default=0),
        rank=rank,
        nope_dim=key_length - rotary,
        rotary_dim=rotary,
        value_dim=reader.integer("attention.value_length_mla", 1, 2048),
        scale=key_length**-0.5,
    )
