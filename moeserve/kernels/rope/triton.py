"""QK-norm, rotation and the way into the KV pool, in one kernel."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def rotation(weight, cos, sin, DIM: tl.constexpr, SIZE: tl.constexpr):
    """What `norm_and_rotate` multiplies a head's values and their partners with, float32 [1, SIZE] each. cos, sin:
    pointers to the position's row; weight: the norm's."""
    d = tl.arange(0, SIZE)[None, :]
    inside = d < DIM
    is_low = d < DIM // 2
    angle = tl.where(is_low, d, d - DIM // 2)
    partner = tl.where(is_low, d + DIM // 2, d - DIM // 2)
    s = tl.load(sin + angle, inside, 0.0)
    own = tl.load(weight + d, inside, 0.0) * tl.load(cos + angle, inside, 0.0)
    return own, tl.load(weight + partner, inside, 0.0) * tl.where(is_low, -s, s)


@triton.jit
def norm_and_rotate(heads, live, own, other, DIM: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr):
    """RMSNorm and rotation of the rows of DIM that heads [H, 1] point to, by `rotation`: float32 [H, SIZE]."""
    d = tl.arange(0, SIZE)[None, :]
    inside = live & (d < DIM)
    a = tl.load(heads + d, inside, 0.0).to(tl.float32)
    b = tl.load(heads + tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2), inside, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a, 1) / DIM + EPS)[:, None]
    return scale * (a * own + b * other)


@kernel
def rope_store_kernel(
    q, k, v, q_norm, k_norm, cos, sin, positions, slots, count, q_out, keys, values,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, EPS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per token and KV head, with the HEADS / KV_HEADS heads that read it; GROUP and SIZE are powers of two
    that hold the group and a head. Nothing is stored for a token whose slot is below 0 but its q."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, h = tl.program_id(0), tl.program_id(1)
    existing, position, slot = tl.load(count), tl.load(positions + i), tl.load(slots + i)
    if i >= existing:
        return
    token, position, slot = i.to(tl.int64), position.to(tl.int64), slot.to(tl.int64)
    cos += position * (DIM // 2)
    sin += position * (DIM // 2)
    d = tl.arange(0, SIZE)[None, :]
    g = tl.arange(0, GROUP)[:, None]
    live = g < HEADS // KV_HEADS
    head = (h * (HEADS // KV_HEADS) + g) * DIM
    own, other = rotation(q_norm, cos, sin, DIM, SIZE)
    rotated = norm_and_rotate(q + token * Q_STRIDE + head, live, own, other, DIM, EPS, SIZE)
    to = q_out + token * (HEADS * DIM) + head + d
    tl.store(to, (rotated * DIM**-0.5).to(q_out.dtype.element_ty), live & (d < DIM))
    if slot >= 0:
        one = tl.zeros([1, 1], tl.int32)
        own, other = rotation(k_norm, cos, sin, DIM, SIZE)
        key = norm_and_rotate(k + token * K_STRIDE + h * DIM + one, one == 0, own, other, DIM, EPS, SIZE)
        at = (slot * KV_HEADS + h) * DIM + d
        tl.store(keys + at, key.to(keys.dtype.element_ty), d < DIM)
        value = tl.load(v + token * V_STRIDE + h * DIM + d, d < DIM, 0.0)
        tl.store(values + at, value.to(values.dtype.element_ty), d < DIM)
