"""8-bit KV caches in Triton kernels; `kv.py` specifies the arithmetic. Numbers and scales are separate tensors."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import COMPILED

KV_BLOCK = tl.constexpr(32)
# Converts four codes in a word to float16, two per word ($0, $1), times $3 and {last}: code + 128 are the last bits
# of 1024 + 128 + code, from which 1152 is subtracted. The compiler's own conversion takes one code at a time, at an
# eighth of the rate of other instructions.
_SCALE_CODES = """{{
    .reg .b32 t, m;
    xor.b32 t, $2, 0x80808080;
    mov.b32 m, 0x64806480;
    prmt.b32 $0, t, 0x64646464, 0x4140;
    prmt.b32 $1, t, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, $0, m;
    sub.rn.f16x2 $1, $1, m;
    mul.rn.f16x2 $0, $0, $3;
    mul.rn.f16x2 $1, $1, {last};
}}"""
SCALE_BYTES = tl.constexpr(_SCALE_CODES.format(last="$4"))
SCALE_WORD = tl.constexpr(_SCALE_CODES.format(last="$3"))
# The same for four e4m3 numbers, which compute capability 8.9 and later convert two at a time.
_SCALE_FP8 = """{{
    .reg .b16 low, high;
    mov.b32 {{low, high}}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    mul.rn.f16x2 $0, $0, $3;
    mul.rn.f16x2 $1, $1, {last};
}}"""
SCALE_FP8_BYTES = tl.constexpr(_SCALE_FP8.format(last="$4"))
SCALE_FP8_WORD = tl.constexpr(_SCALE_FP8.format(last="$3"))
FP8_MAX = tl.constexpr(448.0)


@triton.jit
def quantize_kv(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Quantises float32 [ROWS, SIZE] to int8 codes [ROWS, SIZE] and float16 scales [ROWS, SIZE / 32]."""
    blocks = tl.reshape(x, [ROWS, SIZE // KV_BLOCK, KV_BLOCK])
    nothing = tl.sum(blocks * 0.0, 2)  # NaN if a number is not finite
    scales = (tl.max(tl.abs(blocks), 2) / 127.0 + nothing).to(tl.float16)
    kept = scales.to(tl.float32)
    scaled = blocks * tl.where(kept > 0, 1.0 / kept, 0.0)[:, :, None]
    # Adding 1.5 * 2^23 rounds to an integer, ties to even, as the reference does.
    codes = (scaled + 12582912.0) - 12582912.0
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
    return tl.reshape(codes.to(tl.int8), [ROWS, SIZE]), scales


@triton.jit
def quantize_kv_fp8(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Quantises float32 [ROWS, SIZE] to e4m3 [ROWS, SIZE] and float16 scales [ROWS, 1]."""
    nothing = tl.sum(x * 0.0, 1)  # NaN if a number is not finite
    scales = (tl.max(tl.abs(x), 1) / FP8_MAX + nothing).to(tl.float16)[:, None]
    kept = scales.to(tl.float32)
    scaled = x * tl.where(kept > 0, 1.0 / kept, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX)
    if not COMPILED:  # the interpreter's conversion loses a carry, except for numbers of 3 bits
        power = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        away = tl.maximum(power, 2.0**-6) * (1.5 * 2.0**20)
        scaled = (scaled + away) - away
    return scaled.to(tl.float8e4nv), scales


@triton.jit
def code_value(codes, IS_FP8: tl.constexpr):
    """Returns the values of int8 codes, or of the bits of e4m3, in float16. Compiled kernels have instructions for
    it."""
    if IS_FP8:
        bits = codes.to(tl.int32)
        mantissa, exponent = bits & 7, (bits >> 3) & 15
        size = tl.where(exponent == 0, mantissa, (mantissa + 8) << tl.maximum(exponent - 1, 0)) * 2.0**-9
        size = tl.where((bits & 127) == 127, float("nan"), size)
        x = tl.where((bits & 128) == 0, size, -size).to(tl.float16)
    else:
        x = codes.to(tl.float16)
    return x


@triton.jit
def dequantize_kv(codes, scales, ROWS: tl.constexpr, SIZE: tl.constexpr, IS_FP8: tl.constexpr):
    """Converts codes to float16. codes: int8, or the bits of e4m3."""
    groups: tl.constexpr = scales.shape[1]
    blocks = tl.reshape(codes, [ROWS, groups, SIZE // groups])
    each = tl.broadcast_to(scales[:, :, None], blocks.shape)
    if COMPILED:
        scale: tl.constexpr = SCALE_FP8_BYTES if IS_FP8 else SCALE_BYTES
        x = tl.inline_asm_elementwise(scale, "=&r,=&r,r,r,r", [blocks, each], tl.float16, True, 4)
    else:
        x = code_value(blocks, IS_FP8) * each
    return tl.reshape(x, [ROWS, SIZE])


@triton.jit
def as_float16(word):
    """Splits int32 into two float16 values by their bits."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return low, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def by_halves(x):
    """Reorders the columns of [ROWS, SIZE]: columns 0 and 1 of each four first, then the others."""
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [ROWS, SIZE // 4, 2, 2]), [0, 2, 1, 3]), [ROWS, SIZE])


@triton.jit
def from_halves(x):
    """Undoes `by_halves` for x [ROWS, SIZE], of any dtype: restores the columns' order."""
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [ROWS, 2, SIZE // 4, 2]), [0, 2, 1, 3]), [ROWS, SIZE])


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def dequantize_words(words, scales, ROWS: tl.constexpr, SIZE: tl.constexpr, IS_FP8: tl.constexpr):
    """Converts codes to float16 [ROWS, SIZE], with columns in the order of `by_halves`. So each thread writes to shared
    memory next to its neighbours, without bank conflicts. words: int32 [ROWS, SIZE / 4], four codes each; scales: as
    for `dequantize_kv`."""
    bits = scales.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    groups: tl.constexpr = scales.shape[1]
    words = tl.reshape(words, [ROWS, groups, SIZE // groups // 4])
    each = tl.broadcast_to((bits | (bits << 16))[:, :, None], words.shape)
    if COMPILED:
        by: tl.constexpr = SCALE_FP8_WORD if IS_FP8 else SCALE_WORD
        low, high = tl.inline_asm_elementwise(by, "=&r,=&r,r,r", [words, each], (tl.int32, tl.int32), True, 1)
        x0, x1 = as_float16(low)
        x2, x3 = as_float16(high)
    else:
        scale, _ = as_float16(each)
        x0 = code_value((words << 24) >> 24, IS_FP8) * scale
        x1 = code_value((words << 16) >> 24, IS_FP8) * scale
        x2 = code_value((words << 8) >> 24, IS_FP8) * scale
        x3 = code_value(words >> 24, IS_FP8) * scale
    low, high = tl.reshape(tl.join(x0, x1), [ROWS, SIZE // 2]), tl.reshape(tl.join(x2, x3), [ROWS, SIZE // 2])
    x = tl.reshape(tl.permute(tl.join(low, high), [0, 2, 1]), [ROWS, SIZE])
    if COMPILED:
        # A reduction over single numbers hides the joins; otherwise Triton chooses a worse layout for a product's
        # operand.
        x = tl.reduce(tl.reshape(x, [ROWS, SIZE, 1]), 2, larger)
    return x


@triton.jit
def store_kv(numbers, scales, at, x, live, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Stores one head's float32 x [1, SIZE], of which DIM are valid, at offset `at` of a layer's keys or values:
    rounded to their dtype, or quantised if there are scales; only if `live`. Returns the values that attention will
    read, [1, SIZE]."""
    d = tl.arange(0, SIZE)[None, :]
    if scales is None:
        kept = x.to(numbers.dtype.element_ty)
        tl.store(numbers + at + d, kept, (d < DIM) & live)
    else:
        is_fp8: tl.constexpr = numbers.dtype.element_ty == tl.float8e4nv
        per: tl.constexpr = DIM if is_fp8 else KV_BLOCK
        if is_fp8:
            stored, each = quantize_kv_fp8(tl.where(d < DIM, x, 0.0), 1, SIZE)
            codes = stored.to(tl.int8, bitcast=True)
        else:
            stored, each = quantize_kv(tl.where(d < DIM, x, 0.0), 1, SIZE)
            codes = stored
        g = tl.arange(0, each.shape[1])[None, :]
        tl.store(numbers + at + d, stored, (d < DIM) & live)
        tl.store(scales + at // per + g, each, (g < DIM // per) & live)
        kept = dequantize_kv(codes, each, 1, SIZE, is_fp8)
    return kept


@triton.jit
def load_kv(
    numbers, scales, slot, live, DIM: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PAST_L1: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Loads keys or values of one KV head for attention: [ROWS, SIZE], zeros where `live` [ROWS] is false. slot: int64
    [ROWS], offset of each slot in numbers. PAST_L1: bypasses the L1 cache, which may hold older content. WORDS: loads
    four codes at a time and returns columns in the order of `by_halves`; used for values, which attention writes to
    shared memory as float16."""
    cache: tl.constexpr = ".cg" if PAST_L1 else ""
    if scales is None:
        d = tl.arange(0, SIZE)[None, :]
        x = tl.load(numbers + slot[:, None] + d, live[:, None] & (d < DIM), 0, cache_modifier=cache)
    else:
        is_fp8: tl.constexpr = numbers.dtype.element_ty == tl.float8e4nv
        per: tl.constexpr = DIM if is_fp8 else KV_BLOCK
        g = tl.arange(0, 1 if is_fp8 else SIZE // KV_BLOCK)[None, :]
        at = scales + (slot // per)[:, None] + g
        each = tl.load(at, live[:, None] & (g < DIM // per), 0.0, cache_modifier=cache)
        if WORDS:
            w = tl.arange(0, SIZE // 4)[None, :]
            at = numbers.to(tl.pointer_type(tl.int32)) + (slot // 4)[:, None] + w
            codes = tl.load(at, live[:, None] & (w < DIM // 4), 0, cache_modifier=cache)
            x = dequantize_words(codes, each, ROWS, SIZE, is_fp8)
        else:
            d = tl.arange(0, SIZE)[None, :]
            at = numbers.to(tl.pointer_type(tl.int8)) + slot[:, None] + d
            codes = tl.load(at, live[:, None] & (d < DIM), 0, cache_modifier=cache)
            x = dequantize_kv(codes, each, ROWS, SIZE, is_fp8)
    return x
