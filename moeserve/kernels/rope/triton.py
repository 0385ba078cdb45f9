"""QK-norm, rotation and the way into the KV pool, in one kernel."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def norm_and_rotate(heads, weight, cos, sin, live, DIM: tl.constexpr, EPS: tl.constexpr, HALF: tl.constexpr):
    """heads: pointers [H, 1] to rows of DIM. Gives the two halves, float32 [H, HALF]."""
    d = tl.arange(0, HALF)[None, :]
    inside = d < DIM // 2
    a = tl.load(heads + d, live & inside, 0.0).to(tl.float32)
    b = tl.load(heads + DIM // 2 + d, live & inside, 0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + EPS)[:, None]
    a *= scale * tl.load(weight + d, inside, 0.0)
    b *= scale * tl.load(weight + DIM // 2 + d, inside, 0.0)
    c, s = tl.load(cos + d, inside, 0.0), tl.load(sin + d, inside, 0.0)
    return a * c - b * s, b * c + a * s


@kernel
def rope_store_kernel(
    q, k, v, q_norm, k_norm, cos, sin, positions, slots, count, q_out, keys, values,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, EPS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per token and KV head, with the HEADS / KV_HEADS heads that read it; GROUP and HALF are powers of two
    that hold the group and half a head. Nothing is stored for a token whose slot is below 0 but its q."""
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
    d = tl.arange(0, HALF)[None, :]
    inside = d < DIM // 2
    g = tl.arange(0, GROUP)[:, None]
    live = g < HEADS // KV_HEADS
    head = (h * (HEADS // KV_HEADS) + g) * DIM
    a, b = norm_and_rotate(q + token * Q_STRIDE + head, q_norm, cos, sin, live, DIM, EPS, HALF)
    to = q_out + token * (HEADS * DIM) + head + d
    tl.store(to, (a * DIM**-0.5).to(q_out.dtype.element_ty), live & inside)
    tl.store(to + DIM // 2, (b * DIM**-0.5).to(q_out.dtype.element_ty), live & inside)
    if slot >= 0:
        one = tl.zeros([1, 1], tl.int32)
        low, high = norm_and_rotate(
            k + token * K_STRIDE + h * DIM + one, k_norm, cos, sin, one == 0, DIM, EPS, HALF
        )
        at = (slot * KV_HEADS + h) * DIM
        tl.store(keys + at + d, low.to(keys.dtype.element_ty), inside)
        tl.store(keys + at + DIM // 2 + d, high.to(keys.dtype.element_ty), inside)
        e = tl.arange(0, 2 * HALF)
        value = tl.load(v + token * V_STRIDE + h * DIM + e, e < DIM, 0.0)
        tl.store(values + at + e, value.to(values.dtype.element_ty), e < DIM)
