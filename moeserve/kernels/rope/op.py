"""Launches norm and RoPE of q and k, and the store to the KV pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.rope.triton import rope_store_kernel


@dataclass(frozen=True, slots=True)
class SectionPositions:
    """Positions of rows that rotate by three numbers (multimodal RoPE, as in Qwen's vision models): time, height and
    width. Each rotary frequency uses one of them."""

    positions: Tensor  # int32 [n, 3]
    height: int  # number of frequencies that rotate by height: 1, 4, 7, ..
    width: int  # the same by width: 2, 5, 8, ..; all others rotate by time
    time: int = 0  # not 0: the first ones rotate by time, the next by height, the last by width

    def part(self, rows: slice) -> SectionPositions:
        return replace(self, positions=self.positions[rows])


def rope_store(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    count: Tensor,
    q_out: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    v_eps: float | None = None,
    *,
    norm_after: bool = False,
    v_scale: float = 1.0,
    sections: SectionPositions | None = None,
) -> None:
    """Computes q_out = rotate(norm(q)) / sqrt(dim); keys[slots[i]] = rotate(norm(k[i])), values[slots[i]] = v_scale *
    v[i], i < count[0]. k and v None: only q, for rows that attend to another layer's keys.

    q [n, heads * dim], k [n, kv_heads * dim], v [n, kv_heads * v_dim], rows at any stride; positions, slots int32 [n]
    (negative slot: not stored); q_out [n, heads, dim]; keys [slots, kv_heads, dim], values [slots, kv_heads, v_dim],
    int8 if there are float16 key_scales, value_scales [slots, kv_heads, dim / 32] and [.., v_dim / 32]. q_norm,
    k_norm: None without a norm, float32 [dim] for a norm per head, [heads * dim] or [kv_heads * dim] for one over all
    heads. cos, sin float32 [positions, rotary_dim / 2]: the first rotary_dim dimensions of a head rotate. v_eps:
    epsilon of v's norm per head, without weights; None: no norm. norm_after: the norms of heads come after RoPE.
    sections: what rows rotate by, instead of positions. Raises ValueError for a norm or angles of other sizes. eps:
    added to the mean square under the norm's root."""
    (n, heads, dim), (kv_heads, v_dim) = q_out.shape, values.shape[1:]
    rotary = rotary_dim(cos, dim)
    q_full, k_full = full_norm_size(q_norm, heads, dim), full_norm_size(k_norm, kv_heads, dim)
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
        None if sections is None else sections.positions,
        slots,
        count,
        q_out,
        keys,
        values,
        key_scales,
        value_scales,
        q.stride(0),
        0 if k is None else k.stride(0),
        0 if v is None else v.stride(0),
        heads,
        kv_heads,
        dim,
        v_dim,
        rotary,
        None if q_norm is None else eps,
        None if k_norm is None else eps,
        v_eps,
        v_scale,
        q_full,
        k_full,
        norm_after,
        next_power_of_2(heads // kv_heads),
        next_power_of_2(dim),
        next_power_of_2(v_dim),
        0 if sections is None else sections.height,
        0 if sections is None else sections.width,
        0 if sections is None else sections.time,
        pdl(),
        num_warps=4,
        launch_pdl=pdl(),
    )


def rotary_dim(cos: Tensor, dim: int) -> int:
    """Returns the rotated dimensions per head for angles [positions, rotary_dim / 2]. Raises ValueError if they
    exceed dim."""
    rotary = 2 * cos.shape[1]
    if rotary > dim:
        raise ValueError(f"{rotary} columns of a head of {dim} cannot rotate")
    return rotary


def full_norm_size(weight: Tensor | None, heads: int, dim: int) -> int:
    """Returns 0 if there is no norm, or one for each head (`weight` [dim]); else (`weight` [heads * dim]) the least
    power of two that is at least heads * dim. Raises ValueError for a weight of another length."""
    if weight is None or len(weight) == dim:
        return 0
    if len(weight) != heads * dim:
        raise ValueError(f"a norm of {len(weight)} columns fits neither {dim} nor {heads} * {dim}")
    return next_power_of_2(heads * dim)
