"""Attention's q, k and v in one tensor of a checkpoint, cut into the three of a GGUF."""

from __future__ import annotations

from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.fused_qkv import qkv_rows

from .fused_rows import fused_rows
from .remade import Made


def fused_qkv(theirs: str) -> Made:
    """Returns a function that cuts `theirs`.weight, within a layer, into q, k and v: rows of q, then k, then v."""
    return fused_rows(theirs, (n.ATTN_Q, n.ATTN_K, n.ATTN_V), qkv_rows)
