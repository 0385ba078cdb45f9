"""Many tokens times a quantised matrix, on the tensor cores: a tile of weights is dequantised once and multiplied with
BM tokens. out^T = W x^T: the weights are the left operand, tokens the narrow side, so that 16 tokens waste nothing.

A step of the loop takes one low part of UB units: 16 * UB bytes of a row, which are 16 * UB columns for each field that
the part holds.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel
from moeserve.kernels.linear.gemv import expert_planes
from moeserve.kernels.planes.triton import BYTE_ONES, load_words, merge_codes, scale_and_min


@triton.jit
def spread(values, UB: tl.constexpr):
    """[BN, UB] to [BN, UB * 16]: a value for each column of a unit's field."""
    wide = tl.broadcast_to(values[:, :, None], [values.shape[0], UB, 16])
    return tl.reshape(wide, [values.shape[0], UB * 16])


@triton.jit
def byte_to_float(byte, SIGNED: tl.constexpr):
    """Exact: into the mantissa of 2^23, and 2^23 taken off. The hardware's conversion has a quarter of the rate."""
    if SIGNED:
        return (byte ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0
    return (byte | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def field_weights(low, high, words, supers, part, I: tl.constexpr, live, F: tl.constexpr, UB: tl.constexpr):
    """float32 weights of field I of low part `part` of UB units, [BN, UB * 16], from the bytes of its parts."""
    f = part * (8 // F.low_bits) + I
    if F.table == 0:
        low, high = low.to(tl.int32), high.to(tl.int32)
    codes = merge_codes(low, high, I * F.low_bits, f * F.high_bits % 8, F, BYTE_ONES)
    numbers = byte_to_float(codes.to(tl.int32), F.low_bits == 8 or F.table != 0)
    g = f * 16 // F.group
    word, min_word = load_words(words, g, live, F)
    s, m = scale_and_min(word, min_word, supers, g, F)
    return numbers * spread(s, UB) - spread(m, UB)


@triton.jit
def load_parts(codes, scales, supers, r, step, COLS: tl.constexpr, F: tl.constexpr, UB: tl.constexpr):
    """What step `step` takes of rows r [BN]: low part step % low_bits of UB units from step // low_bits * UB on.

    codes: uint8 pointers; codes, scales, supers: at the expert's first row. Gives the bytes of the low part and of the
    high one that goes with it [BN, UB * 16], pointers to the units' scale words [BN, UB], the super-blocks' words, and
    which units exist [1, UB].
    """
    UNITS: tl.constexpr = (COLS + 127) // 128
    PARTS: tl.constexpr = F.low_bits + F.high_bits
    part = step % F.low_bits
    first = step // F.low_bits * UB
    u = first + tl.arange(0, UB)
    live = (u < UNITS)[None, :]
    b = tl.arange(0, UB * 16)
    live_bytes = (first + b // 16 < UNITS)[None, :]
    at = codes + r[:, None] * (PARTS * UNITS * 16) + (first * 16 + b)[None, :]
    low = tl.load(at + part * (UNITS * 16), live_bytes, 0)
    high = low
    if F.high_bits > 0:
        high_part = part * (8 // F.low_bits) * F.high_bits // 8
        high = tl.load(at + (F.low_bits + high_part) * (UNITS * 16), live_bytes, 0)
    d = r[:, None]
    if F.has_super:
        d = tl.load(supers + r[:, None] * ((COLS + 255) // 256) + u[None, :] // 2, live, 0)
    return low, high, scales + r[:, None] * (F.words * UNITS) + u[None, :] * F.words, d, live


@triton.jit
def accumulate_fields(
    acc, codes, scales, supers, x, tokens_live, r, step, COLS: tl.constexpr, F: tl.constexpr, UB: tl.constexpr
):
    """acc [BN, BM] + the products of step `step` of `load_parts`. x: pointers [BM] to the rows."""
    low, high, words, d, live = load_parts(codes, scales, supers, r, step, COLS, F, UB)
    b = tl.arange(0, UB * 16)
    for i in tl.static_range(8 // F.low_bits):
        f = step % F.low_bits * (8 // F.low_bits) + i
        k = (step // F.low_bits * UB + b // 16) * 128 + f * 16 + b % 16
        a = tl.load(x[:, None] + k[None, :], tokens_live[:, None] & (k < COLS)[None, :], 0.0)
        w = field_weights(low, high, words, d, step % F.low_bits, i, live, F, UB).to(a.dtype)
        acc = tl.dot(w, tl.trans(a), acc)
    return acc


@triton.jit
def accumulate_floats(acc, codes, x, tokens_live, r, step, COLS: tl.constexpr, BK: tl.constexpr):
    """acc [BN, BM] + the products of columns step * BK on of a float matrix: float32 ones as tf32, thrice."""
    k = step * BK + tl.arange(0, BK)
    w = tl.load(codes + r[:, None] * COLS + k[None, :], (k < COLS)[None, :], 0.0)
    a = tl.load(x[:, None] + k[None, :], tokens_live[:, None] & (k < COLS)[None, :], 0.0)
    if w.dtype == tl.float32:
        acc = tl.dot(w, tl.trans(a.to(tl.float32)), acc, input_precision="tf32x3")
    else:
        acc = tl.dot(w.to(a.dtype), tl.trans(a), acc)
    return acc


@triton.jit
def route_pointers(x, block_routes, count, block, COLS: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr):
    """The routes of a block [BM], which of them exist, and pointers to their rows of x."""
    routes = block * BM + tl.arange(0, BM)
    if block_routes is not None:
        routes = tl.load(block_routes + routes)
        live = routes >= 0
    else:
        live = routes < tl.load(count)
    token = tl.where(live, routes, 0) // TOP_K
    return routes, live, x + token.to(tl.int64) * COLS


@kernel
def gemm_kernel(
    x, codes, scales, supers, up_codes, up_scales, up_supers, block_expert, block_routes, count, out,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, F_UP: tl.constexpr, TOP_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[i] = W x[i], or silu(W x[i]) * (W_up x[i]) where up_codes is given; grid (rows / BN, blocks of BM).

    x [tokens, COLS]; out [.., ROWS]. Blocks as in gemv.gemv_kernel, with BM routes each. BK: columns of a float matrix,
    or bytes of a quantised one, at a time.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(1)
    expert = tl.full([], 0, tl.int64)
    if block_expert is not None:
        expert = tl.load(block_expert + block).to(tl.int64)
        if expert < 0:
            return
    elif block * BM >= tl.load(count):
        return
    routes, live, rows = route_pointers(x, block_routes, count, block, COLS, TOP_K, BM)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    r = row if ROWS % BN == 0 else tl.minimum(row, ROWS - 1)
    y = matmul(codes, scales, supers, expert, rows, live, r, ROWS, COLS, F, BM, BN, BK)
    if up_codes is not None:
        up = matmul(up_codes, up_scales, up_supers, expert, rows, live, r, ROWS, COLS, F_UP, BM, BN, BK)
        y = y / (1.0 + tl.exp(-y)) * up
    at = out + tl.where(live, routes, 0).to(tl.int64)[None, :] * ROWS + row[:, None]
    tl.store(at, y.to(out.dtype.element_ty), live[None, :] & (row < ROWS)[:, None])


@triton.jit
def matmul(
    codes, scales, supers, expert, x, live, r,
    ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """float32 [BN, BM]: rows r of an expert times the rows that x points to."""
    acc = tl.zeros([BN, BM], tl.float32)
    codes, scales, supers = expert_planes(codes, scales, supers, expert, ROWS, COLS, F)
    if F is None:
        for step in range((COLS + BK - 1) // BK):
            acc = accumulate_floats(acc, codes, x, live, r, step, COLS, BK)
    else:
        bytes = codes.to(tl.pointer_type(tl.uint8))
        UB: tl.constexpr = BK // 16
        for step in range((COLS + 128 * UB - 1) // (128 * UB) * F.low_bits):
            acc = accumulate_fields(acc, bytes, scales, supers, x, live, r, step, COLS, F, UB)
    return acc
