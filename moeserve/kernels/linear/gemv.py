"""Few tokens times a quantised matrix: integer dot products on the ordinary cores, memory-bound.

A program owns BN rows of the output and all columns. It reads each weight once from memory, 16 bytes a thread, and
again from its L1 for every further token: worth it up to a few tokens a matrix, above that `gemm.py`. Four codes and
four int8 activations make one dp4a; the group's scale comes after the dot: acc += xs * (s * (x . q) - m * sum x).

Tiles are [UB units, BR rows, NB rows, 4 words] with UB * BR = the program's threads: a thread has one unit of columns,
whose activations it keeps in registers for its NB rows. The order of the dimensions is what makes Triton lay out
weights, scales and activations alike; a conversion would be a trip through shared memory each.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import COMPILED, kernel
from moeserve.kernels.planes.triton import WORD_ONES, load_words, merge_codes, scale_and_min
from moeserve.kernels.quantize.triton import store_quantized


@triton.jit
def dp4a(a, b, c):
    """c + the dot product of two words of four signed bytes."""
    if COMPILED:
        out = tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)
    else:
        out = c
        for byte in tl.static_range(4):
            out += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return out


@triton.jit
def dot_units(codes, scales, supers, x_codes, x_scales, r, u, COLS: tl.constexpr, F: tl.constexpr):
    """Dot products of rows r [BR, NB] with one row of activations, over units u [UB]: float32 [UB, BR, NB].

    codes and x_codes: int32 pointers; all pointers at the expert's first row or at the token's. Units past the end
    count nothing.
    """
    UNITS: tl.constexpr = (COLS + 127) // 128
    BR: tl.constexpr = r.shape[0]
    u1 = u[:, None, None]
    live = u1 < UNITS
    j = tl.arange(0, 4)[None, None, None, :]
    code = (codes + r[None] * ((F.low_bits + F.high_bits) * UNITS * 4) + u1 * 4)[:, :, :, None] + j
    word = scales + r[None] * (F.words * UNITS) + u1 * F.words
    d = r[None]
    if F.has_super:
        d = tl.load(supers + r[None] * ((COLS + 255) // 256) + u1 // 2, live, 0)
    alike = tl.zeros([1, BR, 1], tl.int32)
    acc = tl.zeros([u.shape[0], BR, r.shape[1]], tl.float32)
    for f in tl.static_range(8):
        if f * F.low_bits % 8 == 0:
            low = tl.load(code + (f * F.low_bits // 8) * (UNITS * 4), live[:, :, :, None], 0)
        if F.high_bits == 0:
            high = low
        elif f * F.high_bits % 8 == 0:
            high = tl.load(code + (F.low_bits + f * F.high_bits // 8) * (UNITS * 4), live[:, :, :, None], 0)
        q = merge_codes(low, high, f * F.low_bits % 8, f * F.high_bits % 8, F, WORD_ONES)
        column = u1 * 128 + f * 16 + alike
        x = tl.load(x_codes + (column // 4)[:, :, :, None] + j, (column < COLS)[:, :, :, None], 0)
        if f * 16 % F.group == 0:
            dots = tl.zeros_like(q)
            sums = tl.zeros_like(x)
        dots = dp4a(q, x, dots)
        sums = dp4a(tl.full(x.shape, WORD_ONES, tl.int32), x, sums)
        if (f + 1) * 16 % F.group == 0:
            if f * 16 // F.group % F.groups_per_word == 0:
                w, w_min = load_words(word, f * 16 // F.group, live, F)
            s, m = scale_and_min(w, w_min, d, f * 16 // F.group, F)
            x_scale = tl.load(x_scales + column // 32, column < COLS, 0.0)
            total = tl.sum(dots, 3).to(tl.float32)
            acc += x_scale * (s * total - m * tl.sum(sums, 3).to(tl.float32))
    return acc


@triton.jit
def dot_row(
    codes, scales, supers, x, x_codes, x_scales, r, COLS: tl.constexpr, F: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Rows r [BR, NB] times one row of activations: float32 [BR * NB]. F: the format, or None for floats; BK: columns
    at once."""
    if F is None:
        rows = tl.reshape(r, [r.shape[0] * r.shape[1]])
        partial = tl.zeros([rows.shape[0], BK], tl.float32)
        for first in tl.static_range(0, COLS, BK):
            k = first + tl.arange(0, BK)
            w = tl.load(codes + rows[:, None] * COLS + k[None, :], (k < COLS)[None, :], 0.0)
            partial += w.to(tl.float32) * tl.load(x + k, k < COLS, 0.0).to(tl.float32)[None, :]
        out = tl.sum(partial, 1)
    else:
        acc = tl.zeros([BK // 128, r.shape[0], r.shape[1]], tl.float32)
        for first in tl.static_range(0, (COLS + 127) // 128, BK // 128):
            u = first + tl.arange(0, BK // 128)
            acc += dot_units(codes, scales, supers, x_codes, x_scales, r, u, COLS, F)
        out = tl.reshape(tl.sum(acc, 0), [r.shape[0] * r.shape[1]])
    return out


@triton.jit
def expert_planes(codes, scales, supers, expert, ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr):
    """Pointers to an expert's first row; expert: int64."""
    if F is None:
        codes += expert * (ROWS * COLS)
    else:
        codes += expert * (ROWS * (F.low_bits + F.high_bits) * ((COLS + 127) // 128) * 4)
        scales += expert * (ROWS * F.words * ((COLS + 127) // 128))
        if F.has_super:
            supers += expert * (ROWS * ((COLS + 255) // 256))
    return codes, scales, supers


@kernel
def gemv_kernel(
    x, x_codes, x_scales, codes, scales, supers, up_codes, up_scales, up_supers,
    block_expert, block_routes, count, out, out_codes, out_scales,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[i] = W x[i], or silu(W x[i]) * (W_up x[i]) where up_codes is given; grid (rows / (BR * NB), blocks).

    With block_expert: block b is of expert block_expert[b] (none below 0) and computes the routes block_routes[b, BLOCK]
    (none below 0; without block_routes, route b alone): x row route // TOP_K to out row route.
    Without: block b computes rows b * BLOCK on, below count[0].
    The gated product goes to out_codes, out_scales as int8 where they are given, all else to out [.., ROWS].
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(1)
    expert = tl.full([], 0, tl.int64)
    last = block * BLOCK + BLOCK
    if block_expert is not None:
        expert = tl.load(block_expert + block).to(tl.int64)
        if expert < 0:
            return
    else:
        last = tl.minimum(last, tl.load(count))
    BN: tl.constexpr = BR * NB
    first_row = tl.program_id(0) * BN
    r = first_row + tl.arange(0, BR)[:, None] * NB + tl.arange(0, NB)[None, :]
    if ROWS % BN != 0:
        r = tl.minimum(r, ROWS - 1)
    row = first_row + tl.arange(0, BN)
    codes, scales, supers = expert_planes(codes, scales, supers, expert, ROWS, COLS, F)
    if up_codes is not None:
        up_codes, up_scales, up_supers = expert_planes(up_codes, up_scales, up_supers, expert, ROWS, COLS, F_UP)
    for i in range(block * BLOCK, last):
        route = i
        if block_routes is not None:
            route = tl.load(block_routes + i)
        if route >= 0:
            token = (route // TOP_K).to(tl.int64)
            xt, xc, xs = x, x_codes, x_scales
            if x is not None:
                xt += token * COLS
            if x_codes is not None:
                xc += token * (COLS // 4)
                xs += token * (COLS // 32)
            y = dot_row(codes, scales, supers, xt, xc, xs, r, COLS, F, BK)
            if up_codes is not None:
                y = y / (1.0 + tl.exp(-y)) * dot_row(up_codes, up_scales, up_supers, xt, xc, xs, r, COLS, F_UP, BK)
            at = route.to(tl.int64)
            if out_codes is not None:
                store_quantized(y, out_codes + at * ROWS, out_scales + at * (ROWS // 32), first_row, ROWS, BN)
            else:
                tl.store(out + at * ROWS + row, y.to(out.dtype.element_ty), row < ROWS)
