"""Launches norm and rotation of q and k and their way into the KV pool."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.launch import PDL
from moeserve.kernels.rope.triton import rope_store_kernel


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    count: Tensor,
    q_out: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """q_out = rotate(norm(q)) / sqrt(dim); keys, values[slots[i]] = rotate(norm(k[i])), v[i], for i < count[0].

    q [n, heads * dim], k, v [n, kv_heads * dim], rows at any stride; cos, sin float32 [positions, dim / 2];
    positions, slots int32 [n] (slot below 0: not stored); q_out [n, heads, dim]; keys, values [slots, kv_heads, dim].
    """
    (n, heads, dim), kv_heads = q_out.shape, keys.shape[1]
    rope_store_kernel(
        (n, kv_heads),
        q,
        k,
        v,
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        slots,
        count,
        q_out,
        keys,
        values,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        heads,
        kv_heads,
        dim,
        eps,
        1 << (heads // kv_heads - 1).bit_length(),
        1 << (dim - 1).bit_length(),
        PDL,
        num_warps=4,
        launch_pdl=PDL,
    )
