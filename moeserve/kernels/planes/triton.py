"""Reading planes in kernels: from parts to codes, from words to scales. `__init__.py` has the layout.

The same functions work on int32 words of four bytes (ONES = 0x01010101) and on single bytes (ONES = 1).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import COMPILED
from moeserve.kernels.planes.formats import LEVELS, Scale, Table

WORD_ONES = tl.constexpr(0x01010101)
BYTE_ONES = tl.constexpr(1)

_U8_MIN = tl.constexpr(int(Scale.U8_MIN))
_NIBBLE_MIN = tl.constexpr(int(Scale.NIBBLE_MIN))
_I8 = tl.constexpr(int(Scale.I8))
_F16 = tl.constexpr(int(Scale.F16))
_F16_MIN = tl.constexpr(int(Scale.F16_MIN))
_NO_TABLE = tl.constexpr(int(Table.NONE))


@triton.constexpr_function
def level(table, code):
    return LEVELS[Table(table)][code]


@triton.constexpr_function
def table_word(table, first):
    """Four levels from `first` on, as the bytes of a word."""
    word = 0
    for i in range(4):
        word |= (LEVELS[Table(table)][first + i] & 255) << (8 * i)
    return f"0x{word:08X}"


@triton.constexpr_function
def lookup_assembly(table):
    """Looks up four nibbles, one in each byte of a word: 8 levels by byte permutation, twice, then by bit 3."""
    words = [table_word(table, first) for first in (0, 4, 8, 12)]
    return f"""{{
        .reg .b32 n, s, low, high, mask;
        and.b32 n, $1, 0x07070707;
        shr.u32 s, n, 4;
        or.b32 n, n, s;
        prmt.b32 s, n, 0, 0x4420;
        mov.b32 low, {words[0]};
        mov.b32 high, {words[1]};
        prmt.b32 low, low, high, s;
        mov.b32 high, {words[2]};
        mov.b32 mask, {words[3]};
        prmt.b32 high, high, mask, s;
        shl.b32 mask, $1, 4;
        prmt.b32 mask, mask, 0, 0xBA98;
        lop3.b32 $0, mask, high, low, 0xCA;
    }}"""


@triton.jit
def look_up(codes, TABLE: tl.constexpr, ONES: tl.constexpr):
    """Nibbles, one a byte of int32 words, to the table's levels as signed bytes (with ONES = 1 the lowest byte counts)."""
    if COMPILED:
        levels = tl.inline_asm_elementwise(lookup_assembly(TABLE), "=r,r", [codes], tl.int32, True, 1)
    else:
        levels = codes * 0
        for byte in tl.static_range(1 if ONES == 1 else 4):
            code = (codes >> (8 * byte)) & 15
            for k in tl.static_range(16):
                chosen = tl.where(code == k, level(TABLE, k) & 255, 0).to(codes.dtype)
                levels |= chosen << (8 * byte)
    return levels


@triton.jit
def merge_codes(low, high, low_shift, high_shift, F: tl.constexpr, ONES: tl.constexpr):
    """A field's codes from the parts that hold it: unsigned bytes, but signed ones from 8 bits or a table."""
    if F.low_bits == 8:
        codes = low
    else:
        codes = (low >> low_shift) & (((1 << F.low_bits) - 1) * ONES)
        if F.high_bits > 0:
            codes |= ((high >> high_shift) & (((1 << F.high_bits) - 1) * ONES)) << F.low_bits
        if F.table != _NO_TABLE:
            codes = look_up(codes, F.table, ONES)
    return codes


@triton.jit
def low_half(word):
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word):
    return ((word >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def power_of_two(byte):
    """2^(byte - 128), subnormal below 2."""
    bits = tl.where(byte < 2, 0x00200000 << byte, (byte - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_words(words, g, mask, F: tl.constexpr):
    """The words with the scale (and the min) of group g. words: pointers to the word of group 0."""
    if F.scale == _U8_MIN:
        word = words + g // 4
        return tl.load(word, mask, 0), tl.load(word + 2, mask, 0)
    word = tl.load(words + g // F.groups_per_word, mask, 0)
    return word, word


@triton.jit
def scale_and_min(word, min_word, supers, g, F: tl.constexpr):
    """float32 s and m of group g: a weight is s * code - m (the offset of the codes is in m).

    supers: the super-blocks' words, of the shape of the words; not read where the type has none.
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
    else:
        if F.scale == _I8:
            s = low_half(supers) * ((word << (24 - shift)) >> 24).to(tl.float32)
        elif F.scale == _F16:
            s = low_half(word >> (16 * (g % 2)))
        else:
            s = power_of_two((word >> shift) & 255)
        m = s * F.offset
    return s, m
