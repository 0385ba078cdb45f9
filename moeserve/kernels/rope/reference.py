"""The specification of what happens to q, k and v between their projection and attention.

Rotation: Su et al. 2021, https://arxiv.org/abs/2104.09864, with pairs (i, i + dim / 2) as in GPT-NeoX; the norm of each
head of q and k is Qwen3's (https://arxiv.org/abs/2505.09388).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moeserve.kernels.norm.reference import norm


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [n, any number, dim] by the angles of their tokens, cos and sin [n, rotary_dim / 2]; float64. Of each head
    the first rotary_dim columns rotate, the others stay."""
    rotary = 2 * cos.shape[1]
    a, b = heads[..., :rotary].double().chunk(2, dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([a * c - b * s, b * c + a * s, heads[..., rotary:].double()], dim=-1)


def norm_heads(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of heads [n, any number, dim], float64: of each head with a weight [dim], of all of a token's heads as
    one with a weight [number * dim], none without."""
    if weight is None:
        return heads.double()
    if len(weight) == heads.shape[-1]:
        return norm(heads, weight, eps)
    return norm(heads.flatten(1), weight, eps).view(heads.shape)


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """q as attention wants it, float64 [n, heads, dim], scaled by 1/sqrt(dim); k and v go to the KV pool.

    q [n, heads, dim], k and v [n, kv_heads, dim], q_norm and k_norm as in `norm_heads`, cos and sin as in `rotate`,
    slots [n].
    keys, values [slots, kv_heads, dim], float16 (or wider, to see k before it is rounded): rows `slots` are written.
    """
    keys[slots.long()] = rotate(norm_heads(k, k_norm, eps), cos, sin).to(keys.dtype)
    values[slots.long()] = v.to(values.dtype)
    return rotate(norm_heads(q, q_norm, eps), cos, sin) / math.sqrt(q.shape[-1])
