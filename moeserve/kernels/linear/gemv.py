"""Few tokens times a quantised matrix: integer dot products on the ordinary cores, memory-bound.

A program owns some rows of the output and all columns. It reads each weight once from memory, 16 bytes a thread, and
again from its L1 for every further T tokens. Four codes and four int8 activations make one dp4a; the group's scale
comes after the dot: acc += xs * (s * (x . q) - m * sum x).

Tiles are [UB units, BR rows, NB rows, 4 words] with UB * BR = the program's threads: a thread has one unit of columns,
whose activations it keeps in registers for its NB rows. The order of the dimensions is what makes Triton lay out
weights, scales and activations alike; a conversion would be a trip through shared memory each.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
# (Triton compiles no starred tuples.)

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
        out = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1
        )
    else:
        out = c
        for byte in tl.static_range(4):
            out += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return out


@triton.jit
def prefetch_rows(
    codes, first_row, ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, BN: tl.constexpr
):
    """Asks the L2 for the codes of BN rows: what comes before the wait for the kernel ahead hides behind it."""
    if COMPILED:
        if F is None:
            SIZE: tl.constexpr = BN * COLS * (codes.dtype.element_ty.primitive_bitwidth // 8)
        else:
            SIZE: tl.constexpr = BN * (F.low_bits + F.high_bits) * ((COLS + 127) // 128) * 16
        start = codes.to(tl.int64, bitcast=True) + first_row.to(tl.int64) * (SIZE // BN)
        piece = tl.arange(0, 128)
        for at in tl.static_range(0, SIZE, 128 * 128):
            within = at + piece * 128
            address = start + tl.minimum(within, SIZE - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], tl.int32, False, 1
            )


@triton.jit
def unit_pointers(codes, scales, supers, r, u, COLS: tl.constexpr, F: tl.constexpr):
    """Of units u [UB, 1, 1] of rows r [1, BR, NB]: pointers to the words of part 0 [.., 4] and to the scale words, and
    the super-blocks' words. All pointers given are at the expert's first row, codes as int32."""
    UNITS: tl.constexpr = (COLS + 127) // 128
    code = codes + r * ((F.low_bits + F.high_bits) * UNITS * 4) + u * 4
    word = scales + r * (F.words * UNITS) + u * F.words
    d = r
    if F.has_super:
        d = tl.load(supers + r * ((COLS + 255) // 256) + u // 2, u < UNITS, 0)
    return code[:, :, :, None] + tl.arange(0, 4)[None, None, None, :], word, d


@triton.jit
def unpack_columns(
    low, high, word, min_word, code, words, d, live, H: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr
):
    """The 32 columns H of units: codes of both fields, s and m of both (one group of 32 has the same twice), and what
    the next call takes: the parts and words at hand."""
    UNITS: tl.constexpr = (COLS + 127) // 128
    if 2 * H * F.low_bits % 8 == 0:
        low = tl.load(code + (2 * H * F.low_bits // 8) * (UNITS * 4), live[:, :, :, None], 0)
    if F.high_bits == 0:
        high = low
    elif 2 * H * F.high_bits % 8 == 0:
        high = tl.load(code + (F.low_bits + 2 * H * F.high_bits // 8) * (UNITS * 4), live[:, :, :, None], 0)
    q0 = merge_codes(low, high, 2 * H * F.low_bits % 8, 2 * H * F.high_bits % 8, F, WORD_ONES)
    if F.low_bits == 8:
        low = tl.load(code + (2 * H + 1) * (UNITS * 4), live[:, :, :, None], 0)
    q1 = merge_codes(low, high, (2 * H + 1) * F.low_bits % 8, (2 * H + 1) * F.high_bits % 8, F, WORD_ONES)
    if H * 32 // F.group % F.groups_per_word == 0:
        word, min_word = load_words(words, H * 32 // F.group, live, F)
    s0, m0 = scale_and_min(word, min_word, d, H * 32 // F.group, F)
    s1, m1 = s0, m0
    if F.group == 16:
        s1, m1 = scale_and_min(word, min_word, d, H * 2 + 1, F)
    return low, high, word, min_word, q0, q1, s0, m0, s1, m1


@triton.jit
def multiply_columns(x0, x1, sum0, sum1, q0, q1, s0, m0, s1, m1, F: tl.constexpr):
    """s * (x . q) - m * sum x of 32 columns, before the activations' scale."""
    zero = tl.zeros_like(q0)
    if F.group == 32:
        dots = tl.sum(dp4a(q1, x1, dp4a(q0, x0, zero)), 3).to(tl.float32)
        out = s0 * dots
        if F.has_min:
            out -= m0 * (sum0 + sum1)
    else:
        out = s0 * tl.sum(dp4a(q0, x0, zero), 3).to(tl.float32) + s1 * tl.sum(dp4a(q1, x1, zero), 3).to(
            tl.float32
        )
        if F.has_min:
            out -= m0 * sum0 + m1 * sum1
    return out


@triton.jit
def load_field(x_codes, column, COLS: tl.constexpr):
    """16 columns from `column` [UB, BR, 1] on: words [.., 4] and their sum, float32."""
    x = tl.load(
        x_codes + (column // 4)[:, :, :, None] + tl.arange(0, 4)[None, None, None, :],
        (column < COLS)[:, :, :, None],
        0,
    )
    sums = dp4a(tl.full(x.shape, WORD_ONES, tl.int32), x, tl.zeros_like(x))
    return x, tl.sum(sums, 3).to(tl.float32)


@triton.jit
def zeros_of(like, T: tl.constexpr):
    out = ()
    for _ in tl.static_range(T):
        out = out + (tl.zeros(like.shape, tl.float32),)
    return out


@triton.jit
def dot_units(
    acc, up_acc, codes, scales, supers, up_codes, up_scales, up_supers, x_codes, x_scales, r, u,
    COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Adds the dot products of rows r [1, BR, NB] over units u [UB, 1, 1] to acc and, where there is an up matrix,
    up_acc: tuples of T of float32 [UB, BR, NB], for the T rows of activations in the tuples x_codes, x_scales."""
    UNITS: tl.constexpr = (COLS + 127) // 128
    live = (u < UNITS) & (r >= 0)
    code, words, d = unit_pointers(codes, scales, supers, r, u, COLS, F)
    low, high, word, min_word = code, code, words, words
    if F_UP is not None:
        up_code, up_words, up_d = unit_pointers(up_codes, up_scales, up_supers, r, u, COLS, F_UP)
        up_low, up_high, up_word, up_min_word = up_code, up_code, up_words, up_words
    for h in tl.static_range(4):
        low, high, word, min_word, q0, q1, s0, m0, s1, m1 = unpack_columns(
            low, high, word, min_word, code, words, d, live, h, COLS, F
        )
        if F_UP is not None:
            up_low, up_high, up_word, up_min_word, p0, p1, t0, n0, t1, n1 = unpack_columns(
                up_low, up_high, up_word, up_min_word, up_code, up_words, up_d, live, h, COLS, F_UP
            )
        column = u * 128 + h * 32 + tl.zeros([1, r.shape[1], 1], tl.int32)
        new, up_new = (), ()
        for t in tl.static_range(T):
            x0, sum0 = load_field(x_codes[t], column, COLS)
            x1, sum1 = load_field(x_codes[t], column + 16, COLS)
            xs = tl.load(x_scales[t] + column // 32, column < COLS, 0.0)
            new = new + (acc[t] + xs * multiply_columns(x0, x1, sum0, sum1, q0, q1, s0, m0, s1, m1, F),)
            if F_UP is not None:
                more = multiply_columns(x0, x1, sum0, sum1, p0, p1, t0, n0, t1, n1, F_UP)
                up_new = up_new + (up_acc[t] + xs * more,)
        acc, up_acc = new, up_new
    return acc, up_acc


@triton.jit
def dot_floats(codes, x, r, COLS: tl.constexpr, BK: tl.constexpr):
    """Rows r [1, BR, NB] of floats times x: float32 [BR, NB]."""
    rows = tl.reshape(r, [r.shape[1] * r.shape[2]])
    partial = tl.zeros([rows.shape[0], BK], tl.float32)
    for first in tl.static_range(0, COLS, BK):
        k = first + tl.arange(0, BK)
        w = tl.load(codes + rows[:, None] * COLS + k[None, :], (k < COLS)[None, :], 0.0)
        partial += w.to(tl.float32) * tl.load(x + k, k < COLS, 0.0).to(tl.float32)[None, :]
    return tl.reshape(tl.sum(partial, 1), [r.shape[1], r.shape[2]])


@triton.jit
def dot_quantised(
    codes, scales, supers, up_codes, up_scales, up_supers, x_codes, x_scales, r,
    COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, BK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Rows r [1, BR, NB] times T rows of activations: tuples of T of float32 [BR, NB], of the matrix and, unless F_UP
    is None, of the up matrix. BK: columns at once."""
    u = tl.arange(0, BK // 128)[:, None, None]
    like = u + r
    acc = zeros_of(like, T)
    up_acc = zeros_of(like, 0 if F_UP is None else T)
    for first in tl.static_range(0, (COLS + 127) // 128, BK // 128):
        acc, up_acc = dot_units(
            acc, up_acc, codes, scales, supers, up_codes, up_scales, up_supers, x_codes, x_scales, r, first + u,
            COLS, F, F_UP, T,
        )  # fmt: skip
    out, up_out = (), ()
    for t in tl.static_range(T):
        out = out + (tl.sum(acc[t], 0),)
        if F_UP is not None:
            up_out = up_out + (tl.sum(up_acc[t], 0),)
    return out, up_out


@triton.jit
def dot_rows(
    codes, scales, supers, x, x_codes, x_scales, r,
    COLS: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The same for one matrix, floats where F is None."""
    if F is None:
        out = ()
        for t in tl.static_range(T):
            out = out + (dot_floats(codes, x[t], r, COLS, BK),)
    else:
        out, _ = dot_quantised(
            codes, scales, supers, None, None, None, x_codes, x_scales, r, COLS, F, None, BK, T
        )
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


@triton.jit
def token_rows(x, x_codes, x_scales, first, end, TOP_K: tl.constexpr, COLS: tl.constexpr, T: tl.constexpr):
    """Routes first .. first + T - 1, -1 from `end` on, and pointers to their rows of activations: tuples of T."""
    routes, xs, codes, scales = (), (), (), ()
    for t in tl.static_range(T):
        route = tl.where(first + t < end, first + t, -1)
        routes = routes + (route,)
        token = (tl.maximum(route, 0) // TOP_K).to(tl.int64)
        if x is not None:
            xs = xs + (x + token * COLS,)
        if x_codes is not None:
            codes = codes + (x_codes + token * (COLS // 4),)
            scales = scales + (x_scales + token * (COLS // 32),)
    return routes, xs, codes, scales


@triton.jit
def store_row(y, route, out, out_codes, out_scales, first_row, STRIDE: tl.constexpr, ROWS: tl.constexpr):
    """y [BR, NB]: rows first_row on of route's output, as int8 where out_codes is given; nothing below route 0."""
    BN: tl.constexpr = y.shape[0] * y.shape[1]
    if route >= 0:
        at = route.to(tl.int64) * STRIDE
        if out_codes is not None:
            store_quantized(tl.reshape(y, [BN]), out_codes + at, out_scales + at // 32, first_row, ROWS, BN)
        else:
            row = first_row + tl.arange(0, BN)
            tl.store(out + at + row, tl.reshape(y, [BN]).to(out.dtype.element_ty), row < ROWS)


@triton.jit
def tile_rows(first_row, ROWS: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr):
    """[1, BR, NB], -1 beyond ROWS."""
    r = first_row + tl.arange(0, BR)[None, :, None] * NB + tl.arange(0, NB)[None, None, :]
    return r if ROWS % (BR * NB) == 0 else tl.where(r < ROWS, r, -1)


@triton.jit
def multiply_rows(
    x, x_codes, x_scales, codes, scales, supers, out, beside_codes, beside_scales, beside_supers, first, end,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, BESIDE_ROWS: tl.constexpr, F_BESIDE: tl.constexpr,
    T: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The program's tile of rows first .. first + T - 1 of the output, those below `end`."""
    rows, xt, xc, xs = token_rows(x, x_codes, x_scales, first, end, 1, COLS, T)
    tile = tl.program_id(0)
    TILES: tl.constexpr = (ROWS + BR * NB - 1) // (BR * NB)
    STRIDE: tl.constexpr = ROWS + BESIDE_ROWS
    if tile < TILES:
        r = tile_rows(tile * (BR * NB), ROWS, BR, NB)
        y = dot_rows(codes, scales, supers, xt, xc, xs, r, COLS, F, BK, T)
        for t in tl.static_range(T):
            store_row(y[t], rows[t], out, None, None, tile * (BR * NB), STRIDE, ROWS)
    elif BESIDE_ROWS > 0:
        first_row = (tile - TILES) * (BR * NB)
        r = tile_rows(first_row, BESIDE_ROWS, BR, NB)
        z = dot_rows(beside_codes, beside_scales, beside_supers, xt, xc, xs, r, COLS, F_BESIDE, BK, T)
        for t in tl.static_range(T):
            store_row(z[t], rows[t], out + ROWS, None, None, first_row, STRIDE, BESIDE_ROWS)


@kernel
def gemv_kernel(
    x, x_codes, x_scales, codes, scales, supers, experts, count, out, beside_codes, beside_scales, beside_supers,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, BESIDE_ROWS: tl.constexpr, F_BESIDE: tl.constexpr,
    T: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[i] = W x[i], [.., ROWS + BESIDE_ROWS], the last columns by the matrix beside where there is one.

    Grid (row tiles of W, then those of the matrix beside; blocks of T rows of x). With `experts` a block is one row, W
    that of experts[i], and nothing is done where that is below 0; without, for rows below count[0].
    """
    if PDL:
        gdc_launch_dependents()
    first, tile = tl.program_id(1) * T, tl.program_id(0)
    TILES: tl.constexpr = (ROWS + BR * NB - 1) // (BR * NB)
    if PDL:
        if experts is None:
            if tile < TILES:
                prefetch_rows(codes, tile * (BR * NB), ROWS, COLS, F, BR * NB)
            elif BESIDE_ROWS > 0:
                prefetch_rows(beside_codes, (tile - TILES) * (BR * NB), BESIDE_ROWS, COLS, F_BESIDE, BR * NB)
        gdc_wait()
    end = first + T
    if experts is not None:
        expert = tl.load(experts + first).to(tl.int64)
        if expert < 0:
            return
        codes, scales, supers = expert_planes(codes, scales, supers, expert, ROWS, COLS, F)
    else:
        end = tl.minimum(end, tl.load(count))
    if T == 1:
        # Once at most: in a loop the compiler orders the loads of one row better, 5 to 15% of the time (measured). Four
        # rows are quicker without.
        for i in range(first, end):
            multiply_rows(
                x, x_codes, x_scales, codes, scales, supers, out, beside_codes, beside_scales, beside_supers, i, end,
                ROWS, COLS, F, BESIDE_ROWS, F_BESIDE, T, BR, NB, BK,
            )  # fmt: skip
    else:
        multiply_rows(
            x, x_codes, x_scales, codes, scales, supers, out, beside_codes, beside_scales, beside_supers, first, end,
            ROWS, COLS, F, BESIDE_ROWS, F_BESIDE, T, BR, NB, BK,
        )  # fmt: skip


@kernel
def gated_gemv_kernel(
    x, x_codes, x_scales, codes, scales, supers, up_codes, up_scales, up_supers, experts, out, out_codes, out_scales,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, TOP_K: tl.constexpr,
    BR: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(W x[route // TOP_K]) * (W_up x[route // TOP_K]) to row `route` of out [.., ROWS], or as int8 of out_codes
    and out_scales, by the matrices of experts[route] (nothing where that is below 0). Grid (row tiles, routes)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    route = tl.program_id(1)
    first_row = tl.program_id(0) * (BR * NB)
    expert = tl.load(experts + route).to(tl.int64)
    if expert < 0:
        return
    codes, scales, supers = expert_planes(codes, scales, supers, expert, ROWS, COLS, F)
    up_codes, up_scales, up_supers = expert_planes(up_codes, up_scales, up_supers, expert, ROWS, COLS, F_UP)
    r = tile_rows(first_row, ROWS, BR, NB)
    for i in range(route, route + 1):  # as in gemv_kernel
        routes, xt, xc, xs = token_rows(x, x_codes, x_scales, i, route + 1, TOP_K, COLS, 1)
        if F is not None and F_UP is not None:
            y, z = dot_quantised(
                codes, scales, supers, up_codes, up_scales, up_supers, xc, xs, r, COLS, F, F_UP, BK, 1
            )
        else:
            y = dot_rows(codes, scales, supers, xt, xc, xs, r, COLS, F, BK, 1)
            z = dot_rows(up_codes, up_scales, up_supers, xt, xc, xs, r, COLS, F_UP, BK, 1)
        gated = y[0] / (1.0 + tl.exp(-y[0])) * z[0]
        store_row(gated, routes[0], out, out_codes, out_scales, first_row, ROWS, ROWS)
