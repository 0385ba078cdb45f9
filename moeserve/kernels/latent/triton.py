"""The operations around latent attention, as Triton kernels: `reference.py` has the arithmetic."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.quantize.triton import store_quantized


@kernel
def norm_kernel(
    x, weight, count, y, codes, scales,
    X_STRIDE: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes y = RMSNorm(x) * weight of each part, or y = x if EPS is None, for the rows below count[0]. x: rows
    X_STRIDE apart; weight float32 [DIM]. y, and codes with scales: [n, PARTS * DIM], each optional. Grid (n, PARTS)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, part = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    row = i.to(tl.int64)
    width: tl.constexpr = PARTS * DIM
    c = tl.arange(0, SIZE)
    live = c < DIM
    value = tl.load(x + row * X_STRIDE + part * DIM + c, live, 0.0).to(tl.float32)
    if EPS is not None:
        value *= tl.rsqrt(tl.sum(value * value, 0) / DIM + EPS) * tl.load(weight + c, live, 0.0)
    if y is not None:
        tl.store(y + row * width + part * DIM + c, value.to(y.dtype.element_ty), live)
    if codes is not None:
        first = part * DIM
        store_quantized(value, codes + row * width, scales + row * (width // 32), first, first + DIM, SIZE)


@kernel
def latent_store_kernel(
    q, latent, norm, cos, sin, positions, slots, count, nope, rotated, keys,
    Q_STRIDE: tl.constexpr, LATENT_STRIDE: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr, ROTARY: tl.constexpr,
    RANK: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, NOPE_SIZE: tl.constexpr, HALF_SIZE: tl.constexpr,
    RANK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scales, splits and rotates the heads of q, and stores the normalised latent with its rotated key in the KV
    cache.

    Grid (n, HEADS + 1): programs (i, 0 .. HEADS - 1) process the heads of row i, (i, HEADS) its latent; rows <
    count[0].

    q [n, HEADS * (NOPE + ROTARY)] and latent [n, RANK + ROTARY], rows at their strides; norm float32 [RANK]; cos,
    sin float32 [positions, ROTARY / 2]. nope [n, HEADS, NOPE], rotated [n, HEADS, ROTARY]; keys [slots, RANK +
    ROTARY]: row slots[i] is written unless slots[i] is negative. *_SIZE: powers of two that hold NOPE, ROTARY / 2
    and RANK.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, part = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(count):
        return
    row = i.to(tl.int64)
    half: tl.constexpr = ROTARY // 2
    if ROTARY:
        r = tl.arange(0, HALF_SIZE)
        in_half = r < half
        angles = tl.load(positions + i).to(tl.int64) * half
        c = tl.load(cos + angles + r, in_half, 0.0)
        s = tl.load(sin + angles + r, in_half, 0.0)
    if part < HEADS:
        head = q + row * Q_STRIDE + part * (NOPE + ROTARY)
        d = tl.arange(0, NOPE_SIZE)
        still = tl.load(head + d, d < NOPE, 0.0).to(tl.float32) * SCALE
        to = row * HEADS + part
        tl.store(nope + to * NOPE + d, still.to(nope.dtype.element_ty), d < NOPE)
        if ROTARY:
            a = tl.load(head + NOPE + 2 * r, in_half, 0.0).to(tl.float32) * SCALE
            b = tl.load(head + NOPE + 2 * r + 1, in_half, 0.0).to(tl.float32) * SCALE
            tl.store(rotated + to * ROTARY + r, (a * c - b * s).to(rotated.dtype.element_ty), in_half)
            tl.store(rotated + to * ROTARY + half + r, (b * c + a * s).to(rotated.dtype.element_ty), in_half)
    else:
        slot = tl.load(slots + i).to(tl.int64)
        if slot >= 0:
            vector = latent + row * LATENT_STRIDE
            d = tl.arange(0, RANK_SIZE)
            x = tl.load(vector + d, d < RANK, 0.0).to(tl.float32)
            x *= tl.rsqrt(tl.sum(x * x, 0) / RANK + EPS) * tl.load(norm + d, d < RANK, 0.0)
            key = keys + slot * (RANK + ROTARY)
            tl.store(key + d, x.to(keys.dtype.element_ty), d < RANK)
            if ROTARY:
                a = tl.load(vector + RANK + 2 * r, in_half, 0.0).to(tl.float32)
                b = tl.load(vector + RANK + 2 * r + 1, in_half, 0.0).to(tl.float32)
                tl.store(key + RANK + r, (a * c - b * s).to(keys.dtype.element_ty), in_half)
                tl.store(key + RANK + half + r, (b * c + a * s).to(keys.dtype.element_ty), in_half)
