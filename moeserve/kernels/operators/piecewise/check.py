"""Checks of piecewise attention's arguments, for all devices."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_WIDTH = 256  # head width
TYPES = (torch.float16, torch.bfloat16, torch.float32)


def check(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, distance: int) -> None:
    """Raises ValueError for shapes or dtypes that do not match, a head wider than 256, or a negative distance."""
    if q1.dim() != 4 or v.dim() != 4 or q1.shape != q2.shape or not k1.shape == k2.shape == v.shape:
        raise ValueError(
            f"q1, k1, q2, k2, v {[tuple(x.shape) for x in (q1, k1, q2, k2, v)]}: q1 and q2 must be alike, and k1, k2, v"
        )
    (batch, heads, _, dim), (kv_batch, kv_heads, _, kv_dim) = q1.shape, v.shape
    if batch != kv_batch or dim != kv_dim or heads % kv_heads:
        raise ValueError(f"keys {tuple(v.shape)} do not fit queries {tuple(q1.shape)}")
    if len({x.dtype for x in (q1, k1, q2, k2, v)}) > 1 or q1.dtype not in TYPES:
        raise ValueError(f"types {[x.dtype for x in (q1, k1, q2, k2, v)]}: one of 16 or 32 bits")
    if dim > MAX_WIDTH:
        raise ValueError(f"a head of {dim} columns: at most {MAX_WIDTH}")
    if distance < 0:
        raise ValueError(f"distance {distance}: at least 0")
