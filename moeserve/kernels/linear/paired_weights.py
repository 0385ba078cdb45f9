"""Unpacks weights as pairs of bfloat16 in one register, without going through float32, where each weight would cost a
byte permutation, a multiplication and half a conversion.

One mask and two byte permutations turn four codes of a word into two pairs of 128 + code (codes below 128 are the 7
bits of 128's mantissa). One subtraction gives two exact codes, and one paired product with s, minus m, two weights.
s and m are rounded to bfloat16 first, the weights afterwards: a product's error is 1.2 to 1.9 times the error with
weights rounded once, and a third of the error with int8 activations (docs/results/gpu-kernels.md). Without inline
assembly (in the interpreter), and for float16 and float32 activations, weights go by way of float32.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from moeserve.kernels.launch import COMPILED
from moeserve.kernels.planes.triton import high_half, low_half, scale_and_min
from moeserve.quantization import Scale

U8_MIN = tl.constexpr(int(Scale.U8_MIN))
I8 = tl.constexpr(int(Scale.I8))


@triton.constexpr_function
def has_pairs(F, dtype):
    """Returns whether products with floats of this dtype use paired weights of this format. Q4_K is the only format
    with mins that does: Q4_1 and Q5_1 would have errors of 2.2e-4, and an expert's limit is 1e-4
    (tests/kernels/experts/test_triton_experts.py). Q2_K, Q3_K, Q5_K, and formats with fewer than 4 low bits, were not
    measured on a GPU."""
    is_near = not F.has_own_min or (F.scale == Scale.U8_MIN and F.high_bits == 0)
    is_measured = is_near and F.low_bits == 4
    return dtype == tl.bfloat16 and not F.is_signed and is_measured and bool(COMPILED)


@triton.constexpr_function
def _code_lines(F, f, low, high):
    """Assembly: four bytes of a field's low and high part to two pairs of 128 + code, in p and q."""
    shift, mask = f * F.low_bits % 8, ((1 << F.low_bits) - 1) * 0x01010101
    lines = [f"shr.b32 q, {low}, {shift};" if shift else f"mov.b32 q, {low};", f"and.b32 q, q, {mask:#x};"]
    if F.high_bits:
        left = F.low_bits - f * F.high_bits % 8
        lines += [
            f"shl.b32 p, {high}, {left};" if left > 0 else f"shr.b32 p, {high}, {-left};",
            f"and.b32 p, p, {(((1 << F.high_bits) - 1) << F.low_bits) * 0x01010101:#x};",
            "or.b32 q, q, p;",
        ]
    return [*lines, "prmt.b32 p, q, 0x43434343, 0x4140;", "prmt.b32 q, q, 0x43434343, 0x4342;"]


@triton.constexpr_function
def _bfloat16_pair(number):
    """Returns an integer of up to 8 bits, twice, as bfloat16."""
    exponent = abs(number).bit_length() - 1
    bits = (0x8000 if number < 0 else 0) | ((127 + exponent) << 7) | ((abs(number) << 7 >> exponent) & 127)
    return f"{bits * 0x10001:#x}"


@triton.constexpr_function
def _weight_lines(F, f, low, high, s, m):
    """Assembly: four bytes of a field's parts to two pairs of weights, in p and q; s and m: pairs. GPUs before
    Hopper have no bfloat16 sums and products, only fma: a * 1 + b, and a * b + -0, round the same."""
    offset = 128 if F.has_own_min else 128 + F.offset
    lines = [".reg .b32 p, q, c, one, zero;", *_code_lines(F, f, low, high)]
    lines += [f"mov.b32 c, {_bfloat16_pair(-offset)};"]
    is_hopper = cuda_capability_geq(9, 0)
    if not is_hopper:
        lines += [f"mov.b32 one, {_bfloat16_pair(1)};", "mov.b32 zero, 0x80008000;"]
    for pair, scale, least in zip("pq", s, m, strict=True):
        lines.append(
            f"{f'add.rn.bf16x2 {pair}, {pair}' if is_hopper else f'fma.rn.bf16x2 {pair}, {pair}, one'}, c;"
        )
        if F.has_own_min or not is_hopper:
            lines.append(f"fma.rn.bf16x2 {pair}, {pair}, {scale}, {least if F.has_own_min else 'zero'};")
        else:
            lines.append(f"mul.rn.bf16x2 {pair}, {pair}, {scale};")
    return lines


@triton.constexpr_function
def pair_assembly(F, f):
    """Operands: two words of weights (output); the low part's bytes; s; and m or, if m is s * offset, the high
    part's bytes."""
    inputs = ["$2"]
    if F.high_bits:
        inputs.append("$3")
    at = 2 + len(inputs)
    s, m = (f"${at}", f"${at + 1}"), (f"${at + 2}", f"${at + 3}")
    lines = _weight_lines(F, f, inputs[0], inputs[-1], s, m)
    return "{ " + " ".join([*lines, "mov.b32 $0, p;", "mov.b32 $1, q;"]) + " }"


@triton.constexpr_function
def word_assembly(F, f):
    """Operands: four weights (output); words of the low and the high part; pairs of s and, unless it is a multiple
    of s, of m."""
    lines = _weight_lines(F, f, "$4", "$5", ("$6", "$6"), ("$7", "$7"))
    return "{ " + " ".join([*lines, "mov.b32 {$0, $1}, p;", "mov.b32 {$2, $3}, q;"]) + " }"


@triton.constexpr_function
def byte_assembly(byte):
    """Moves byte `byte` of a word to bits 8 .. 15 of 2^15: the float 2^15 + byte."""
    return f"prmt.b32 $0, 0x47000000, $1, 0x30{4 + byte}0;"


@triton.jit
def times_byte(d, word, byte: tl.constexpr, bias: tl.constexpr):
    """Returns float32 d * (byte `byte` of a word - bias). d has the 11 significant bits of a float16, so that the
    subtraction is exact. The hardware converts a byte at an eighth of a permutation's rate."""
    number = tl.inline_asm_elementwise(byte_assembly(byte), "=r,r", [word], tl.float32, is_pure=True, pack=1)
    return tl.fma(d, number, d * -(32768.0 + bias))


@triton.jit
def scale_and_negative_min(word, min_word, supers, g: tl.constexpr, F: tl.constexpr):
    """Returns float32 s and -m of group g; -m is undefined if m is s * offset."""
    if F.scale == U8_MIN:
        # The sign is flipped in the super-block's word, not in each group's.
        s = times_byte(low_half(supers), word, g % 4, 0)
        m = times_byte(high_half(supers ^ -0x80000000), min_word, g % 4, 0)
    elif F.scale == I8:
        s = times_byte(low_half(supers), word ^ -0x7F7F7F80, g % 4, 128)
        m = s
    else:
        s, m = scale_and_min(word, min_word, supers, g, F)
        m = -m
    return s, m


@triton.jit
def paired_weights(low, high, s, m, f: tl.constexpr, F: tl.constexpr):
    """Returns bfloat16 s * code + m of field f, or s * (code - offset) if m is s * -offset. low, high: the bytes of
    the parts that contain the field; s, m: float32, of their shape."""
    scale = s.to(tl.bfloat16)
    if F.has_own_min and F.high_bits > 0:
        out = tl.inline_asm_elementwise(
            pair_assembly(F, f),
            "=r,=r,r,r,r,r,r,r",
            [low, high, scale, m.to(tl.bfloat16)],
            tl.bfloat16,
            True,
            4,
        )
    elif F.has_own_min:
        out = tl.inline_asm_elementwise(
            pair_assembly(F, f), "=r,=r,r,r,r,r,r", [low, scale, m.to(tl.bfloat16)], tl.bfloat16, True, 4
        )
    elif F.high_bits > 0:
        out = tl.inline_asm_elementwise(
            pair_assembly(F, f), "=r,=r,r,r,r,r", [low, high, scale], tl.bfloat16, True, 4
        )
    else:
        out = tl.inline_asm_elementwise(
            pair_assembly(F, f), "=r,=r,r,r,r", [low, scale], tl.bfloat16, True, 4
        )
    return out
