"""Multiplies many tokens by a quantised matrix, on the tensor cores: a tile of weights is dequantised once and
multiplied with BM tokens. out^T = W x^T: the weights are the left operand and tokens the narrow side, so that 16
tokens fill a tile.

A loop iteration takes KB K blocks: 8 products of 16 * KB columns, one per field.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import COMPILED, kernel
from moeserve.kernels.linear.gated import gated
from moeserve.kernels.linear.k_blocks import expert_planes
from moeserve.kernels.linear.paired_weights import has_pairs, paired_weights, scale_and_negative_min
from moeserve.kernels.planes.books_triton import load_eight, row_words
from moeserve.kernels.planes.triton import (
    BYTE_ONES,
    code_assembly,
    e4m3_numbers,
    field_assembly,
    load_words,
    merge_codes,
    scale_and_min,
    super_word,
)


@triton.jit
def field_numbers(low, high, f: tl.constexpr, F: tl.constexpr):
    """Returns float32 (code + bias) * unit of field f, from the bytes of the parts that contain it; F has bias and
    unit.

    Integers become floats by bit patterns, four at a time: the hardware's conversions run at a quarter of the rate.
    """
    if COMPILED:
        if F.high_bits > 0:
            out = tl.inline_asm_elementwise(
                field_assembly(F, f), "=r,=r,=r,=r,r,r", [low, high], tl.float32, is_pure=True, pack=4
            )
        else:
            out = tl.inline_asm_elementwise(
                field_assembly(F, f), "=r,=r,=r,=r,r", [low], tl.float32, is_pure=True, pack=4
            )
    else:
        codes = merge_codes(low, high, f * F.low_bits % 8, f * F.high_bits % 8, F, BYTE_ONES)
        if F.is_signed:
            codes = codes.to(tl.uint8).to(tl.int8, bitcast=True)
        out = (codes.to(tl.float32) + F.bias) * F.unit
    return out


@triton.jit
def field_codes(low, high, f: tl.constexpr, F: tl.constexpr, dtype: tl.constexpr):
    """Returns the codes of field f, from the bytes of the parts that contain it: signed codes or code + 128, exact
    in either float dtype."""
    if F.is_signed or dtype != tl.bfloat16 or not COMPILED:
        numbers = field_numbers(low, high, f, F) * (1.0 / F.unit)
        if F.is_signed:
            numbers -= F.bias
        out = numbers.to(dtype)
    elif F.high_bits > 0:
        out = tl.inline_asm_elementwise(
            code_assembly(F, f), "=r,=r,r,r", [low, high], tl.bfloat16, is_pure=True, pack=4
        )
    else:
        out = tl.inline_asm_elementwise(
            code_assembly(F, f), "=r,=r,r", [low], tl.bfloat16, is_pure=True, pack=4
        )
    return out


@triton.jit
def spread(values, KB: tl.constexpr):
    """Expands [BN, KB] to [BN, KB * 16]: one value for all columns of a K block's field."""
    wide = tl.broadcast_to(values[:, :, None], [values.shape[0], KB, 16])
    return tl.reshape(wide, [values.shape[0], KB * 16])


@triton.jit
def next_parts(low, high, at, live, f: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr):
    """Returns the words (low, high) that contain field f of the codes: those given if they still do, else newly loaded
    ones. at: pointers to the bytes of part 0."""
    STRIDE: tl.constexpr = (COLS + 127) // 128 * 16
    if f * F.low_bits % 8 == 0:
        low = tl.load(at + (f * F.low_bits // 8) * STRIDE, live, 0)
    if F.high_bits == 0:
        high = low
    elif f * F.high_bits % 8 == 0:
        high = tl.load(at + (F.low_bits + f * F.high_bits // 8) * STRIDE, live, 0)
    return low, high


@triton.jit
def field_weights(
    low,
    high,
    word,
    min_word,
    words,
    d,
    live,
    f: tl.constexpr,
    F: tl.constexpr,
    KB: tl.constexpr,
    dtype: tl.constexpr,
):
    """Returns the weights [BN, KB * 16] of field f in the float dtype, and the current scale words."""
    if f * 16 % (F.scale_group * F.groups_per_word) == 0:
        word, min_word = load_words(words, f * 16 // F.scale_group, live, F)
    if has_pairs(F, dtype):
        s, m = scale_and_negative_min(word, min_word, d, f * 16 // F.scale_group, F)
        w = paired_weights(low, high, spread(s, KB), spread(m, KB), f, F)
    elif F.e4m3:
        s, _ = scale_and_min(word, min_word, d, f * 16 // F.scale_group, F)
        w = (e4m3_numbers(low.to(tl.int32)) * spread(s, KB)).to(dtype)
    elif F.low_bits == 1:  # 1 and -1: adding the bias would lose too many of the scale's bits
        s, _ = scale_and_min(word, min_word, d, f * 16 // F.scale_group, F)
        w = ((field_numbers(low, high, f, F) - F.bias) * spread(s, KB)).to(dtype)
    else:
        s, m = scale_and_min(word, min_word, d, f * 16 // F.scale_group, F)
        scale = s * (1.0 / F.unit)
        w = (field_numbers(low, high, f, F) * spread(scale, KB) - spread(s * F.bias + m, KB)).to(dtype)
    return w, word, min_word


@triton.jit
def four_bytes(word):
    """Returns the signed bytes of words [.., n], lowest first: float32 [.., 4 n]."""
    a, b, c, d = (word << 24) >> 24, (word << 16) >> 24, (word << 8) >> 24, word >> 24
    wide = tl.join(tl.join(a, c), tl.join(b, d)).to(tl.float32)
    return tl.reshape(wide, [word.shape[0], word.shape[1] * 4])


@triton.jit
def book_weights(
    codes, scales, table, r, first, f: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, KB: tl.constexpr
):
    """Returns float32 weights [BN, KB * 16] of field f of K blocks `first` on, for a codebook type. codes: uint8."""
    eight = tl.arange(0, KB * 2)  # two per K block and field
    u = (first + eight // 2)[None, :]
    j = (f % 2 * 2 + eight % 2)[None, :]
    q0, q1, scale = load_eight(
        codes, scales, table, r[:, None], u, f // 2, j, u < (COLS + 127) // 128, COLS, F
    )
    words = tl.reshape(tl.join(q0, q1), [r.shape[0], KB * 4])
    wide = tl.broadcast_to(scale[:, :, None], [r.shape[0], KB * 2, 8])
    return four_bytes(words) * tl.reshape(wide, [r.shape[0], KB * 16])


@triton.jit
def row_pointers(codes, scales, supers, r, first, COLS: tl.constexpr, F: tl.constexpr, KB: tl.constexpr):
    """Returns pointers for rows r [BN] from K block `first` on: to the bytes of part 0 [BN, KB * 16], with a mask of
    the rows that exist; to the scale words [BN, KB] with their mask; and to the super-blocks' words. Arguments:
    pointers to the expert's first row, codes uint8."""
    K_BLOCKS: tl.constexpr = (COLS + 127) // 128
    u = first + tl.arange(0, KB)
    b = tl.arange(0, KB * 16)
    live = (u < K_BLOCKS)[None, :]
    at = codes + r[:, None] * (F.parts * K_BLOCKS * 16) + (first * 16 + b)[None, :]
    d = r[:, None]
    if F.has_super:
        d = tl.load(supers + r[:, None] * ((COLS + 255) // 256) + u[None, :] // 2, live, 0)
        d = super_word(d, u[None, :], F)
    words = scales + r[:, None] * row_words(F, COLS) + u[None, :] * F.words
    return at, (first + b // 16 < K_BLOCKS)[None, :], words, live, d


@triton.jit
def accumulate_k_blocks(
    acc, up_acc, codes, scales, supers, up_codes, up_scales, up_supers, x, tokens_live, r, first,
    COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Returns acc and up_acc, float32 [BN, BM] each, with the products of K blocks `first` .. + KB - 1 added; up_acc
    unchanged if F_UP is None. x: pointers [BM] to the rows of activations; other arguments as for row_pointers."""
    at, live_bytes, words, live, d = row_pointers(codes, scales, supers, r, first, COLS, F, KB)
    low, high, word, min_word = at, at, words, words
    if F_UP is not None:
        up_at, up_live_bytes, up_words, up_live, up_d = row_pointers(
            up_codes, up_scales, up_supers, r, first, COLS, F_UP, KB
        )
        up_low, up_high, up_word, up_min_word = up_at, up_at, up_words, up_words
    b = tl.arange(0, KB * 16)
    for f in tl.static_range(8):
        k = (first + b // 16) * 128 + f * 16 + b % 16
        a = tl.trans(tl.load(x[:, None] + k[None, :], tokens_live[:, None] & (k < COLS)[None, :], 0.0))
        if F.is_book:
            w = book_weights(codes, scales, supers, r, first, f, COLS, F, KB).to(a.dtype)
        else:
            low, high = next_parts(low, high, at, live_bytes, f, COLS, F)
            w, word, min_word = field_weights(low, high, word, min_word, words, d, live, f, F, KB, a.dtype)
        acc = tl.dot(w, a, acc)
        if F_UP is not None:
            if F_UP.is_book:
                w = book_weights(up_codes, up_scales, up_supers, r, first, f, COLS, F_UP, KB).to(a.dtype)
            else:
                up_low, up_high = next_parts(up_low, up_high, up_at, up_live_bytes, f, COLS, F_UP)
                w, up_word, up_min_word = field_weights(
                    up_low, up_high, up_word, up_min_word, up_words, up_d, up_live, f, F_UP, KB, a.dtype
                )
            up_acc = tl.dot(w, a, up_acc)
    return acc, up_acc


@triton.jit
def multiply_floats(codes, x, tokens_live, r, COLS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Returns [BN, BM]: rows r of a float matrix times x. If either is float32, in tf32x3."""
    acc = tl.zeros([r.shape[0], BM], tl.float32)
    for step in range((COLS + BK - 1) // BK):
        k = step * BK + tl.arange(0, BK)
        w = tl.load(codes + r[:, None] * COLS + k[None, :], (k < COLS)[None, :], 0.0)
        a = tl.load(x[:, None] + k[None, :], tokens_live[:, None] & (k < COLS)[None, :], 0.0)
        if w.dtype == tl.float32 or a.dtype == tl.float32:
            acc = tl.dot(w.to(tl.float32), tl.trans(a.to(tl.float32)), acc, input_precision="tf32x3")
        else:
            acc = tl.dot(w.to(a.dtype), tl.trans(a), acc)
    return acc


@triton.jit
def multiply_quantised(
    codes, scales, supers, up_codes, up_scales, up_supers, x, live, r,
    COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, BM: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Returns float32 [BN, BM]: rows r times the rows that x points to, for the matrix and, unless F_UP is None,
    for up."""
    acc = tl.zeros([r.shape[0], BM], tl.float32)
    up_acc = acc
    bytes = codes.to(tl.pointer_type(tl.uint8))
    up_bytes = bytes
    if F_UP is not None:
        up_bytes = up_codes.to(tl.pointer_type(tl.uint8))
    for first in range(0, (COLS + 127) // 128, KB):
        acc, up_acc = accumulate_k_blocks(
            acc,
            up_acc,
            bytes,
            scales,
            supers,
            up_bytes,
            up_scales,
            up_supers,
            x,
            live,
            r,
            first,
            COLS,
            F,
            F_UP,
            KB,
        )
    return acc, up_acc


@triton.jit
def multiply(
    codes, scales, supers, x, live, r, COLS: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, KB: tl.constexpr
):
    """Multiplies with one matrix; floats if F is None."""
    if F is None:
        out = multiply_floats(codes, x, live, r, COLS, BM, 64)
    else:
        out, _ = multiply_quantised(
            codes, scales, supers, None, None, None, x, live, r, COLS, F, None, BM, KB
        )
    return out


@triton.jit
def route_pointers(x, block_routes, count, routes, COLS: tl.constexpr, TOP_K: tl.constexpr):
    """Returns a block's routes (int32; for a dense matrix its tokens), a mask of those that exist, and pointers to
    their rows of x [tokens, COLS]."""
    if block_routes is not None:
        routes = tl.load(block_routes + routes)
        live = routes >= 0
    else:
        live = routes < tl.load(count)
    token = tl.where(live, routes, 0) // TOP_K
    return routes, live, x + token.to(tl.int64) * COLS


@triton.jit
def add_bias(y, bias, expert, row, ROWS: tl.constexpr):
    """Returns y [BN, BM], plus an expert's bias float32 [.., ROWS] of rows `row` [BN] if there is one."""
    if bias is not None:
        y += tl.load(bias + expert * ROWS + row, row < ROWS, 0.0)[:, None]
    return y


@triton.jit
def add_gate_bias(y, bias, expert, routes, live, row, ROWS: tl.constexpr, BY_ROUTE: tl.constexpr):
    """Adds the biases of a gated product; BY_ROUTE: each route has its own, bias [.., ROWS]."""
    if BY_ROUTE:
        at = bias + tl.where(live, routes, 0).to(tl.int64)[None, :] * ROWS + row[:, None]
        y += tl.load(at, live[None, :] & (row < ROWS)[:, None], 0.0).to(tl.float32)
    else:
        y = add_bias(y, bias, expert, row, ROWS)
    return y


@triton.jit
def part_rows(routes, TOP_K: tl.constexpr, PARTS: tl.constexpr):
    """Returns the rows (int32) of `out` for the routes: `out` has PARTS rows per token, the first TOP_K for its
    routes."""
    if PARTS != TOP_K:
        routes += routes // TOP_K * (PARTS - TOP_K)
    return routes


@triton.jit
def store_tile(y, out, routes, live, row, STRIDE: tl.constexpr, ROWS: tl.constexpr):
    at = out + tl.where(live, routes, 0).to(tl.int64)[None, :] * STRIDE + row[:, None]
    tl.store(at, y.to(out.dtype.element_ty), live[None, :] & (row < ROWS)[:, None])


@kernel
def gemm_kernel(
    x, codes, scales, supers, bias, block_expert, block_routes, count, out, second_codes, second_scales, second_supers,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, SECOND_ROWS: tl.constexpr, F_SECOND: tl.constexpr,
    TOP_K: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out[i] = W x[i], [.., ROWS + SECOND_ROWS]; an optional second matrix gives the last columns; plus bias
    float32 [experts, ROWS + SECOND_ROWS] if given.

    x [tokens, COLS]. A token has TOP_K routes, and out has PARTS rows per token. Grid (row tiles of W, then of the
    second matrix; blocks), blocks as in gemv_kernel with BM routes each."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block, tile = tl.program_id(1), tl.program_id(0)
    expert = tl.full([], 0, tl.int64)
    if block_expert is not None:
        expert = tl.load(block_expert + block).to(tl.int64)
        if expert < 0:
            return
    elif block * BM >= tl.load(count):
        return
    TILES: tl.constexpr = (ROWS + BN - 1) // BN
    STRIDE: tl.constexpr = ROWS + SECOND_ROWS
    routes, live, rows = route_pointers(x, block_routes, count, block * BM + tl.arange(0, BM), COLS, 1)
    routes = part_rows(routes, TOP_K, PARTS)
    if tile < TILES:
        row = tile * BN + tl.arange(0, BN)
        c, s, d = expert_planes(codes, scales, supers, expert, ROWS, COLS, F)
        y = multiply(c, s, d, rows, live, tl.minimum(row, ROWS - 1), COLS, F, BM, KB)
        y = add_bias(y, bias, expert, row, ROWS)
        store_tile(y, out, routes, live, row, STRIDE, ROWS)
    elif SECOND_ROWS > 0:
        row = (tile - TILES) * BN + tl.arange(0, BN)
        r = tl.minimum(row, SECOND_ROWS - 1)
        y = multiply(second_codes, second_scales, second_supers, rows, live, r, COLS, F_SECOND, BM, KB)
        if bias is not None:
            y = add_bias(y, bias + ROWS, 0, row, SECOND_ROWS)
        store_tile(y, out + ROWS, routes, live, row, STRIDE, SECOND_ROWS)


@kernel
def gated_gemm_kernel(
    x, codes, scales, supers, up_codes, up_scales, up_supers, bias, up_bias, block_expert, block_routes, out,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, FORM: tl.constexpr,
    BY_ROUTE: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KB: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes gated(W x[route // TOP_K], W_up x[route // TOP_K]) to row `route` of out [.., ROWS]; grid (tiles,
    blocks). bias, up_bias: float32 [experts, ROWS], optional, added to the products; BY_ROUTE: [routes, ROWS]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(1)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    routes, live, rows = route_pointers(x, block_routes, None, block * BM + tl.arange(0, BM), COLS, TOP_K)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.minimum(row, ROWS - 1)
    codes, scales, supers = expert_planes(codes, scales, supers, expert, ROWS, COLS, F)
    up_codes, up_scales, up_supers = expert_planes(up_codes, up_scales, up_supers, expert, ROWS, COLS, F_UP)
    if F is not None and F_UP is not None:
        y, z = multiply_quantised(
            codes, scales, supers, up_codes, up_scales, up_supers, rows, live, r, COLS, F, F_UP, BM, KB
        )
    else:
        y = multiply(codes, scales, supers, rows, live, r, COLS, F, BM, KB)
        z = multiply(up_codes, up_scales, up_supers, rows, live, r, COLS, F_UP, BM, KB)
    y = add_gate_bias(y, bias, expert, routes, live, row, ROWS, BY_ROUTE)
    z = add_gate_bias(z, up_bias, expert, routes, live, row, ROWS, BY_ROUTE)
    store_tile(gated(y, z, FORM), out, routes, live, row, ROWS, ROWS)
