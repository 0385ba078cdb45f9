"""Reads planes in kernels: from parts to codes, from words to scales. `__init__.py` describes the layout.

The same functions work on int32 words of four bytes (ONES = 0x01010101) and on single bytes (ONES = 1).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import COMPILED
from moeserve.quantization import Scale

WORD_ONES = tl.constexpr(0x01010101)
BYTE_ONES = tl.constexpr(1)

_U8_MIN = tl.constexpr(int(Scale.U8_MIN))
_NIBBLE_MIN = tl.constexpr(int(Scale.NIBBLE_MIN))
_I8 = tl.constexpr(int(Scale.I8))
_F16 = tl.constexpr(int(Scale.F16))
_F16_MIN = tl.constexpr(int(Scale.F16_MIN))
_UE4M3 = tl.constexpr(int(Scale.UE4M3))
_D = tl.constexpr(int(Scale.D))
_ZERO = tl.constexpr(int(Scale.ZERO))
_F32 = tl.constexpr(int(Scale.F32))
_UE4M3_SUPER = tl.constexpr(int(Scale.UE4M3_SUPER))


@triton.constexpr_function
def level(F, code):
    return F.table.levels[code]


@triton.constexpr_function
def table_word(F, first):
    """Returns four levels from `first` on, as the bytes of a word."""
    word = 0
    for i in range(4):
        word |= (F.table.levels[first + i] & 255) << (8 * i)
    return f"0x{word:08X}"


@triton.constexpr_function
def sign_bits(F):
    """Returns the second level of a two-level table as a byte, and the bits in which both levels differ."""
    first, second = (level & 255 for level in F.table.levels)
    return second, first ^ second


@triton.constexpr_function
def lookup_lines(F, source, to):
    """Assembly: looks up four nibbles, one in each byte of `source`: 8 levels by byte permutation, twice, then
    selected by bit 3. For one-bit codes, flips the second level's bits where the code is 0."""
    if F.low_bits == 1:
        last, turned = (bits * 0x01010101 for bits in sign_bits(F))
        return f"""
            xor.b32 n, {source}, 0x01010101;
            mul.lo.u32 n, n, {turned & 255};
            xor.b32 {to}, n, {last:#x};
        """
    words = [table_word(F, first) for first in (0, 4, 8, 12)]
    return f"""
        and.b32 n, {source}, 0x07070707;
        shr.u32 p, n, 4;
        or.b32 n, n, p;
        prmt.b32 p, n, 0, 0x4420;
        mov.b32 a, {words[0]};
        mov.b32 b, {words[1]};
        prmt.b32 a, a, b, p;
        mov.b32 b, {words[2]};
        mov.b32 n, {words[3]};
        prmt.b32 b, b, n, p;
        shl.b32 p, {source}, 4;
        prmt.b32 p, p, 0, 0xBA98;
        lop3.b32 {to}, p, b, a, 0xCA;
    """


@triton.constexpr_function
def lookup_assembly(F):
    return "{ .reg .b32 n, p, a, b;" + lookup_lines(F, "$1", "$0") + "}"


@triton.constexpr_function
def field_assembly(F, f):
    """Converts four bytes of a field's low part ($4) and high part ($5) to four floats (code + F.bias) * F.unit.

    Codes below 128 become bits 16 .. 22 of 1.0 (1 + code / 128), signed bytes bits 8 .. 15 of 2^15.
    """
    low_mask, high_mask = ((1 << F.low_bits) - 1) * 0x01010101, ((1 << F.high_bits) - 1) * 0x01010101
    lines = [
        ".reg .b32 q, h, n, p, a, b;",
        f"shr.b32 q, $4, {f * F.low_bits % 8};",
        f"and.b32 q, q, {low_mask:#x};",
    ]
    if F.high_bits:
        lines += [f"shr.b32 h, $5, {f * F.high_bits % 8};", f"and.b32 h, h, {high_mask:#x};"]
        lines += [f"shl.b32 h, h, {F.low_bits};", "or.b32 q, q, h;"]
    if F.table is not None:
        lines.append(lookup_lines(F, "q", "q"))
    lines.append("xor.b32 q, q, 0x80808080;")
    exponent, selector = ("0x47000000", "0x74{}4") if F.is_signed else ("0x3F000000", "0x7{}44")
    lines += [f"prmt.b32 ${i}, q, {exponent}, {selector.format(i)};" for i in range(4)]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def code_assembly(F, f):
    """Converts four bytes of a field's low part ($2) and high part ($3) to four bfloat16 code + 128, two per word:
    codes below 128 are the 7 bits of 128's mantissa."""
    lines = [
        ".reg .b32 q, h;",
        f"shr.b32 q, $2, {f * F.low_bits % 8};",
        f"and.b32 q, q, {((1 << F.low_bits) - 1) * 0x01010101:#x};",
    ]
    if F.high_bits:
        left = F.low_bits - f * F.high_bits % 8
        lines += [
            f"shl.b32 h, $3, {left};" if left > 0 else f"shr.b32 h, $3, {-left};",
            f"and.b32 h, h, {(((1 << F.high_bits) - 1) << F.low_bits) * 0x01010101:#x};",
            "or.b32 q, q, h;",
        ]
    lines += [f"prmt.b32 ${i}, q, 0x43434343, 0x4{2 * i + 1}4{2 * i};" for i in range(2)]
    return "{ " + " ".join(lines) + " }"


@triton.jit
def look_up(codes, F: tl.constexpr, ONES: tl.constexpr):
    """Looks up nibbles, one per byte of int32 words, in the table of signed bytes; with ONES = 1 only the lowest
    byte counts."""
    if F.low_bits == 1:
        LAST: tl.constexpr = sign_bits(F)[0]
        TURNED: tl.constexpr = sign_bits(F)[1]
        levels = ((codes ^ ONES) * TURNED) ^ (LAST * ONES)
    elif COMPILED:
        levels = tl.inline_asm_elementwise(lookup_assembly(F), "=r,r", [codes], tl.int32, True, 1)
    else:
        levels = codes * 0
        for byte in tl.static_range(1 if ONES == 1 else 4):
            code = (codes >> (8 * byte)) & 15
            for k in tl.static_range(16):
                chosen = tl.where(code == k, level(F, k) & 255, 0).to(codes.dtype)
                levels |= chosen << (8 * byte)
    return levels


@triton.jit
def merge_codes(low, high, low_shift, high_shift, F: tl.constexpr, ONES: tl.constexpr):
    """Returns a field's codes, merged from the low and the high bits: unsigned bytes in the integer type of `low`;
    signed bytes for 8 bits or a table of levels. ONES: a 1 in each byte of that type."""
    if F.low_bits == 8:
        codes = low
    else:
        codes = (low >> low_shift) & (((1 << F.low_bits) - 1) * ONES)
        if F.high_bits > 0:
            codes |= ((high >> high_shift) & (((1 << F.high_bits) - 1) * ONES)) << F.low_bits
        if F.table is not None:
            codes = look_up(codes, F, ONES)
    return codes


@triton.jit
def low_half(word):
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word):
    return ((word >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def power_of_two(byte):
    """Returns float32 2^(byte - 128), exact also for bytes below 2, where it is subnormal."""
    bits = tl.where(byte < 2, 0x00200000 << byte, (byte - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def half_of_ue4m3(byte):
    """Returns half of an unsigned float of 4 and 3 bits; 0 for 127, which is NaN. A float16 with these bits has an
    exponent that is 8 too small."""
    half = ((byte & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(byte == 127, 0.0, half.to(tl.float32) * 128)


@triton.jit
def e4m3_numbers(byte):
    """Returns float32 numbers of bytes with a sign, 4 bits of exponent and 3 of mantissa, in the lowest 8 bits of
    integers."""
    half = (((byte & 128) << 8) | ((byte & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256


@triton.jit
def load_words(words, g, mask, F: tl.constexpr):
    """Returns the int32 words with the scale and the min of group g of a K block; the same word twice if it holds both.
    words: pointers to the K block's first scale word."""
    if F.scale == _U8_MIN:
        word, min_word = tl.load(words, mask, 0), tl.load(words + 1, mask, 0)
    elif F.words == 0:
        word = tl.zeros(words.shape, tl.int32)
        min_word = word
    else:
        word = tl.load(words + g // F.groups_per_word, mask, 0)
        min_word = word
        if F.scale == _ZERO and F.wide == 0:
            min_word = tl.load(words + F.words - 1, mask, 0)
    return word, min_word


@triton.jit
def super_word(word, u, F: tl.constexpr):
    """Returns the super-block's int32 word with the scale of K block u in its lower 16 bits."""
    if F.scale == _D:
        word = word >> (16 * (u % 2))
    return word


@triton.jit
def scale_and_zero(word, zero_word, g, F: tl.constexpr):
    """Returns float32 s and m = s * z of group g."""
    half = word
    if F.wide == 0:
        half = word >> (16 * (g % 2))
        z = (zero_word >> (8 * g)) & 255
    else:
        z = (word >> 16) & 255
    if F.has_bfloat16:
        s = (half << 16).to(tl.float32, bitcast=True)
    else:
        s = low_half(half)
    if F.low_bits == 8:
        z -= 128
    return s, s * z.to(tl.float32)


@triton.jit
def scale_and_min(word, min_word, supers, g, F: tl.constexpr):
    """Returns float32 s and m of group g: a weight is s * code - m (m includes the codes' offset).

    supers: the super-blocks' words, of the words' shape; not read if the type has none.
    """
    shift = 8 * (g % 4)
    if F.scale == _U8_MIN:
        s = low_half(supers) * ((word >> shift) & 255).to(tl.float32)
        m = high_half(supers) * ((min_word >> shift) & 255).to(tl.float32)
    elif F.scale == _NIBBLE_MIN:
        s = low_half(supers) * ((word >> shift) & 15).to(tl.float32)
        m = high_half(supers) * ((word >> (shift + 4)) & 15).to(tl.float32)
    elif F.scale == _F16_MIN:
        s = low_half(word)
        m = -high_half(word)
    elif F.scale == _ZERO:
        s, m = scale_and_zero(word, min_word, g, F)
    else:
        if F.scale == _D:
            s = low_half(supers)
        elif F.scale == _I8:
            s = low_half(supers) * ((word << (24 - shift)) >> 24).to(tl.float32)
        elif F.scale == _F16:
            s = low_half(word >> (16 * (g % 2)))
        elif F.scale == _F32:
            s = word.to(tl.float32, bitcast=True)
        elif F.scale == _UE4M3_SUPER:
            s = half_of_ue4m3((word >> shift) & 255) * supers.to(tl.float32, bitcast=True)
        elif F.scale == _UE4M3:
            s = half_of_ue4m3((word >> shift) & 255)
        else:
            s = power_of_two((word >> shift) & 255)
        m = s * F.offset
    return s, m
