"""QK-norm, rotation and the store to the KV pool, in one kernel."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.quantize.kv_triton import store_kv


@triton.jit
def rotation(weight, cos, sin, DIM: tl.constexpr, ROTARY: tl.constexpr, SIZE: tl.constexpr):
    """Returns the factors by which `norm_and_rotate` multiplies a head's values and their partners, float32 [1, SIZE]
    each. cos, sin: pointers to the position's row, one or [1, SIZE]; weight: the norm's, [H, 1] if rows differ; None:
    no norm."""
    d = tl.arange(0, SIZE)[None, :]
    rotates = d < ROTARY
    is_low = d < ROTARY // 2
    angle = tl.where(is_low, d, d - ROTARY // 2)
    partner = tl.where(is_low, d + ROTARY // 2, d - ROTARY // 2)
    still: tl.constexpr = 1.0 if ROTARY < DIM else 0.0  # cosine of the columns that do not rotate
    s = tl.load(sin + angle, rotates, 0.0)
    if weight is None:
        own = tl.load(cos + angle, rotates, still)
        other = tl.where(is_low, -s, s)
    else:
        own = tl.load(weight + d, d < DIM, 0.0) * tl.load(cos + angle, rotates, still)
        other = tl.load(weight + partner, rotates, 0.0) * tl.where(is_low, -s, s)
    return own, other


@triton.jit
def section_positions(
    positions,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TIME: tl.constexpr,
    ROTARY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Returns the position by which each dimension of a head rotates, int64 [1, SIZE]. positions: pointer to the row's
    three; HEIGHT, WIDTH: numbers of frequencies of these sections. TIME: 0 if the sections' frequencies are interleaved
    (t h w t h w ..), else the number of frequencies of time, which come first (t t h h w w)."""
    d = tl.arange(0, SIZE)[None, :]
    angle = tl.where(d < ROTARY // 2, d, d - ROTARY // 2)
    if TIME:
        section = tl.where(angle < TIME, 0, tl.where(angle < TIME + HEIGHT, 1, 2))
    else:
        section = angle % 3
        section = tl.where(
            (section == 1) & (angle >= 3 * HEIGHT) | (section == 2) & (angle >= 3 * WIDTH), 0, section
        )
    return tl.load(positions + section, d < ROTARY, 0).to(tl.int64)


@triton.jit
def norm_and_rotate(
    heads, live, own, other, scale, behind,
    DIM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Returns the rows of DIM that heads [H, 1] point to after RMSNorm and `rotation`: float32 [H, SIZE]. EPS None:
    no norm; scale, if given, replaces the norm's own factor. behind: weight of a norm after RoPE (`rotation` then
    has none); None: the norm comes first."""
    d = tl.arange(0, SIZE)[None, :]
    a = tl.load(heads + d, live & (d < DIM), 0.0).to(tl.float32)
    partner = tl.where(d < ROTARY // 2, d + ROTARY // 2, d - ROTARY // 2)
    b = tl.load(heads + partner, live & (d < ROTARY), 0.0).to(tl.float32)
    if EPS is None:
        out = a * own + b * other
    elif behind is not None:
        out = a * own + b * other
        out *= tl.rsqrt(tl.sum(out * out, 1) / DIM + EPS)[:, None] * tl.load(behind + d, d < DIM, 0.0)
    else:
        if scale is None:
            scale = tl.rsqrt(tl.sum(a * a, 1) / DIM + EPS)[:, None]
        out = scale * (a * own + b * other)
    return out


@triton.jit
def full_scale(row, WIDTH: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr):
    """Returns float32 1 / sqrt(mean square + EPS) of the WIDTH values to which `row` points."""
    c = tl.arange(0, SIZE)
    x = tl.load(row + c, c < WIDTH, 0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)


@triton.jit
def load_value(v, DIM: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, SIZE: tl.constexpr):
    """Returns the head of DIM that v points to, times SCALE, normalised without weights unless EPS is None: float32
    [1, SIZE]."""
    d = tl.arange(0, SIZE)[None, :]
    value = tl.load(v + d, d < DIM, 0.0).to(tl.float32)
    if EPS is not None:
        value *= tl.rsqrt(tl.sum(value * value, 1) / DIM + EPS)[:, None]
    if SCALE != 1.0:
        value *= SCALE
    return value


@kernel
def rope_store_kernel(
    q, k, v, q_norm, k_norm, cos, sin, positions, rotary, slots, count, q_out, keys, values, key_scales, value_scales,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, ROTARY: tl.constexpr, Q_EPS: tl.constexpr, K_EPS: tl.constexpr,
    V_EPS: tl.constexpr, V_SCALE: tl.constexpr, Q_FULL: tl.constexpr, K_FULL: tl.constexpr, BEHIND: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, V_SIZE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    TIME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalises and rotates q and k, writes q_out, and stores keys and values in the KV pool, for rows below count[0].
    A program per token and KV head, with the HEADS / KV_HEADS query heads that read it. GROUP, SIZE and V_SIZE: powers
    of two that hold the group, a head, and its value of V_DIM. For a token with a negative slot, or without k and v,
    only q is stored.

    Q_EPS, K_EPS, V_EPS: None without a norm; v's has no weights. Q_FULL, K_FULL: 0 for a norm per head, else a
    power of two that holds all heads, which are normalised together with a weight per column. V_SCALE: multiplies
    v. BEHIND: the norms per head come after RoPE. rotary: see `section_positions`; None: rows rotate
    by positions.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, h = tl.program_id(0), tl.program_id(1)
    existing, position, slot = tl.load(count), tl.load(positions + i), tl.load(slots + i)
    if i >= existing:
        return
    token, position, slot = i.to(tl.int64), position.to(tl.int64), slot.to(tl.int64)
    if rotary is None:
        rotates_by = position
    else:
        rotates_by = section_positions(rotary + token * 3, HEIGHT, WIDTH, TIME, ROTARY, SIZE)
    cos += rotates_by * (ROTARY // 2)
    sin += rotates_by * (ROTARY // 2)
    d = tl.arange(0, SIZE)[None, :]
    g = tl.arange(0, GROUP)[:, None]
    live = g < HEADS // KV_HEADS
    head = (h * (HEADS // KV_HEADS) + g) * DIM
    if Q_FULL > 0:
        scale = full_scale(q + token * Q_STRIDE, HEADS * DIM, Q_EPS, Q_FULL)
        own, other = rotation(q_norm + tl.where(live, head, 0), cos, sin, DIM, ROTARY, SIZE)
        rotated = norm_and_rotate(
            q + token * Q_STRIDE + head, live, own, other, scale, None, DIM, ROTARY, Q_EPS, SIZE
        )
    else:
        own, other = rotation(None if BEHIND else q_norm, cos, sin, DIM, ROTARY, SIZE)
        rotated = norm_and_rotate(
            q + token * Q_STRIDE + head,
            live,
            own,
            other,
            None,
            q_norm if BEHIND else None,
            DIM,
            ROTARY,
            Q_EPS,
            SIZE,
        )
    to = q_out + token * (HEADS * DIM) + head + d
    tl.store(to, (rotated * DIM**-0.5).to(q_out.dtype.element_ty), live & (d < DIM))
    if k is not None:  # noqa: SIM102 (Triton compiles both sides of `and`)
        if slot >= 0:
            one = tl.zeros([1, 1], tl.int32)
            if K_FULL > 0:
                scale_k = full_scale(k + token * K_STRIDE, KV_HEADS * DIM, K_EPS, K_FULL)
                own_k, other_k = rotation(k_norm + h * DIM, cos, sin, DIM, ROTARY, SIZE)
                from_k = k + token * K_STRIDE + h * DIM + one
                key = norm_and_rotate(
                    from_k, one == 0, own_k, other_k, scale_k, None, DIM, ROTARY, K_EPS, SIZE
                )
            else:
                own_k, other_k = rotation(None if BEHIND else k_norm, cos, sin, DIM, ROTARY, SIZE)
                from_k = k + token * K_STRIDE + h * DIM + one
                behind_k = k_norm if BEHIND else None
                key = norm_and_rotate(
                    from_k, one == 0, own_k, other_k, None, behind_k, DIM, ROTARY, K_EPS, SIZE
                )
            value = load_value(v + token * V_STRIDE + h * V_DIM, V_DIM, V_EPS, V_SCALE, V_SIZE)
            at = slot * KV_HEADS + h
            store_kv(keys, key_scales, at * DIM, key, True, DIM, SIZE)
            store_kv(values, value_scales, at * V_DIM, value, True, V_DIM, V_SIZE)
