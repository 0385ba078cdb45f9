"""The specification of the steps for q, k and v between their projection and attention.

Rotation: Su et al. 2021, https://arxiv.org/abs/2104.09864, with pairs (i, i + rotary_dim / 2) and optionally only
part of each head, as in GPT-NeoX. The per-head norms of q and k are Qwen3's (https://arxiv.org/abs/2505.09388),
those over all heads MiniMax-M2's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.norm.reference import norm


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads [n, any number, dim], float64, rotated by their tokens' angles, cos and sin [n, rotary_dim / 2].
    Dimensions after the first rotary_dim stay unchanged."""
    rotary_dim = 2 * cos.shape[-1]
    a, b = heads[..., :rotary_dim].double().chunk(2, dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([a * c - b * s, b * c + a * s, heads[..., rotary_dim:].double()], dim=-1)


def norm_heads(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns heads [n, num, dim], float64, normalised: each by weight [dim], or all together by weight [num * dim], or
    not (None). eps: added to the mean square under the norm's root."""
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
    *,
    scale: float | None = None,
    v_eps: float | None = None,
    norm_after: bool = False,
    v_scale: float = 1.0,
) -> Tensor:
    """Returns q for attention, float64 [n, heads, dim], multiplied by `scale` (None: 1/sqrt(dim)); stores k and v to
    the KV pool.

    q [n, heads, dim], k [n, kv_heads, dim] and v [n, kv_heads, any width]; q_norm and k_norm as in `norm_heads`; cos,
    sin [n, rotary_dim / 2]; slots [n]. keys, values [slots, kv_heads, dim], float16 (or wider, to see k unrounded):
    rows `slots` are written. v_eps: epsilon of v's norm per head, without weights; None: no norm. norm_after: the
    norms come after RoPE. v_scale: multiplies v, last. eps: added to the mean square under the norm's root."""

    def turned(heads: Tensor, weight: Tensor | None) -> Tensor:
        if norm_after:
            return norm_heads(rotate(heads, cos, sin), weight, eps)
        return rotate(norm_heads(heads, weight, eps), cos, sin)

    keys[slots.long()] = turned(k, k_norm).to(keys.dtype)
    if v_eps is not None:
        v = norm(v, torch.ones(v.shape[-1]), v_eps)
    values[slots.long()] = (v * v_scale).to(values.dtype)
    return turned(q, q_norm) * (q.shape[-1] ** -0.5 if scale is None else scale)
