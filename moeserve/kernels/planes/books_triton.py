"""Reads planes of codebook types in kernels. `books.py` has the layout and the same in plain torch.

Columns are read eight at a time: j = 0 .. 3 of group g (32 columns) of a k block. An eight has two words of four
signed bytes, number `which` 0 and 1. g may be a compile-time number. Bytes and words are int32 tensors.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.planes.triton import BYTE_ONES, high_half, low_half
from moeserve.quantization.codebook import BookScales, Signs

_PACKED_7 = tl.constexpr(int(Signs.PACKED_7))
_HIGH_7 = tl.constexpr(int(Signs.HIGH_7))
_BYTES = tl.constexpr(int(Signs.BYTES))
_DELTA_GROUP = tl.constexpr(int(Signs.DELTA_GROUP))
_DELTA_ENTRY = tl.constexpr(int(Signs.DELTA_ENTRY))
_INCLUDED = tl.constexpr(int(Signs.INCLUDED))
_WORD_TOP = tl.constexpr(int(BookScales.WORD_TOP))
_NIBBLES_32 = tl.constexpr(int(BookScales.NIBBLES_32))
_NIBBLES_16 = tl.constexpr(int(BookScales.NIBBLES_16))
_HIGH_TOP_3 = tl.constexpr(int(BookScales.HIGH_TOP_3))
_NONE = tl.constexpr(int(BookScales.NONE))
_ODD_NIBBLES = tl.constexpr(0x6996)  # bit n: the number of ones in n is odd


@triton.constexpr_function
def row_words(F, cols):
    """Returns the number of 32-bit scale words per row."""
    return F.row_words((cols + 127) // 128)


@triton.jit
def index_of(low, signs, high, j, g, which: tl.constexpr, F: tl.constexpr):
    """Returns the codebook index (int32) of the eight columns `j` of group g, or of word `which` of them where each
    word has its own. low: the index's low byte; high: the word with the group's high bytes; signs: the eight's byte of
    signs, or the K block's word of scales if signs are included."""
    if F.signs == _HIGH_7:
        low |= (signs & 1) << 8
    elif F.signs == _DELTA_GROUP:
        low |= ((high >> (16 * (g % 2) + 3 * j)) & 7) << 8
    elif F.signs == _DELTA_ENTRY:
        low |= ((high >> (16 * (g % 2) + 4 * j)) & 7) << 8
    elif F.signs == _INCLUDED:
        low |= (((high >> (16 * (g % 2) + 4 * j)) & 15) << 8) | (((signs >> (4 * g + j)) & 1) << 12)
    elif F.high_bits == 2:
        low |= ((high >> (8 * g + 2 * j)) & 3) << 8
    elif F.high_bits == 1:
        low |= ((high >> (8 * g + 2 * j + which)) & 1) << 8
    return low


@triton.jit
def entry_words(low, signs, high, table, j, g, F: tl.constexpr):
    """Returns the two int32 words of four bytes each that the codebook has for the eight columns, without signs. low:
    the low bytes of its one or two indices, a tuple."""
    if F.low_parts == 1:
        at = table.to(tl.pointer_type(tl.int64)) + index_of(low[0], signs, high, j, g, 0, F)
        pair = tl.load(at)
        first, second = pair.to(tl.int32), (pair >> 32).to(tl.int32)
    else:
        first = tl.load(table + index_of(low[0], signs, high, j, g, 0, F))
        second = tl.load(table + index_of(low[1], signs, high, j, g, 1, F))
    return first, second


@triton.jit
def eight_signs(signs, F: tl.constexpr, ONES: tl.constexpr):
    """Returns the signs of eight columns as int32, bit i for column i (1: negative), from a byte (ONES = 1), or of four
    times eight columns from a word of four bytes (ONES = 0x01010101). Where seven signs are stored, the eighth makes
    the number of minuses even."""
    if F.signs == _BYTES:
        out = signs
    else:
        seven = (signs if F.signs == _PACKED_7 else signs >> 1) & (127 * ONES)
        odd = seven ^ (seven >> 4)
        if ONES == 1:
            out = seven | ((_ODD_NIBBLES << 7 >> (odd & 15)) & 128)
        else:
            odd = odd ^ (odd >> 2)
            out = seven | (((odd ^ (odd >> 1)) & ONES) << 7)
    return out


@triton.jit
def with_signs(word, bits):
    """Returns an int32 word of four positive bytes, with byte i negated where bit i of `bits` is set."""
    ones = ((bits & 15) * 0x00204081) & 0x01010101
    return (word ^ (ones * 255)) + ones


@triton.jit
def is_plus(high, j, g, F: tl.constexpr):
    """Returns int32 1 where the delta is added to the eight columns `j` of group g, 0 where it is subtracted. high: the
    word with the group's high bytes."""
    place = 16 * (g % 2) + (15 if F.signs == _DELTA_GROUP else 4 * j + 3)
    return ((high >> place) & 1) ^ 1


@triton.jit
def numbers_of(low, signs, high, table, j, g, F: tl.constexpr):
    """Returns both int32 words of the eight columns `j` of group g, as signed bytes: codebook entries with their signs
    or their delta."""
    first, second = entry_words(low, signs, high, table, j, g, F)
    if F.has_delta:
        twos = is_plus(high, j, g, F) * 0x02020202
        # 8 * entry + 127, plus 0 or 2, minus 128.
        first, second = (first + twos) ^ -0x7F7F7F80, (second + twos) ^ -0x7F7F7F80
    elif F.signs != _INCLUDED:
        minus = eight_signs(signs, F, BYTE_ONES)
        first, second = with_signs(first, minus), with_signs(second, minus >> 4)
    return first, second


@triton.jit
def scale_number(words, top, j, g, F: tl.constexpr):
    """Returns the integer n (int32) from which an eight's scale is computed. words: the K block's word of the group's
    high bytes, and its scale words; top: n itself for formats that keep it in the top of a word."""
    high, octets = words
    if F.scales == _WORD_TOP:
        n = top
    elif F.scales == _HIGH_TOP_3:
        n = (high >> (16 * (g % 2) + 12)) & 7
    elif F.scales == _NIBBLES_16:
        n = (octets >> (8 * g + 4 * (j // 2))) & 15
    elif F.scales == _NIBBLES_32:
        n = (octets >> (4 * g)) & 15
    elif F.scales == _NONE:
        n = octets * 0
    else:
        n = (octets >> (16 * (g // 2) + 3 * (2 * (g % 2) + j // 2))) & 7
    return n


@triton.jit
def load_d(row, u, live, COLS: tl.constexpr, F: tl.constexpr):
    """Returns the two int32 words that contain d, the super-block's float16 scale, for K blocks u; the same word twice
    if one holds all of it. row: pointers to the rows' first scale words."""
    at = row + F.words - 1
    if F.has_tail:
        first = tl.load(row + (COLS + 127) // 128 * F.words + u // 2, live, 0)
        second = first
    elif F.has_d:
        first = tl.load(at + u * F.words, live, 0)
        second = first
    else:
        even = u // 2 * (2 * F.words)
        first, second = tl.load(at + even, live, 0), tl.load(at + even + F.words, live, 0)
    return first, second


@triton.jit
def d_of(first, second, F: tl.constexpr):
    """Returns float32 d from these words."""
    if F.has_tail:
        d = low_half(first)
    elif F.has_d:
        d = high_half(first)
    else:
        even = ((first >> 12) & 15) | (((first >> 28) & 15) << 4)
        odd = ((second >> 12) & 15) | (((second >> 28) & 15) << 4)
        d = low_half(even | odd << 8)
    return d


@triton.jit
def scale_of(n, d, F: tl.constexpr):
    return d * (2 * n + 1).to(tl.float32) * (F.eighths / 8)


@triton.jit
def load_eight(codes, scales, table, r, u, g, j, live, COLS: tl.constexpr, F: tl.constexpr):
    """Loads both words of eight columns and their scale, float32. codes: uint8 pointers to the expert's first row;
    r, u, g, j and live broadcast together."""
    K_BLOCKS: tl.constexpr = (COLS + 127) // 128
    at = codes + r * (F.parts * K_BLOCKS * 16) + u * 16 + g
    row = scales + r * row_words(F, COLS)
    low = (tl.load(at + 4 * j, live, 0).to(tl.int32),)
    if F.low_parts == 2:
        low = low + (tl.load(at + K_BLOCKS * 16 + 4 * j, live, 0).to(tl.int32),)  # noqa: RUF005
    signs, top, high, octets = low[0], low[0], low[0], low[0]
    if F.parts > F.low_parts:
        at += F.low_parts * K_BLOCKS * 16
        signs = tl.load(at + 4 * j, live, 0).to(tl.int32)
    if F.scales == _WORD_TOP:
        top = signs * 0
        for e in tl.static_range(4):
            top |= (tl.load(at + 4 * e, live, 0).to(tl.int32) >> 7) << e
    if F.high_words > 0:
        high = tl.load(row + u * F.words + (g // 2 if F.high_words == 2 else 0), live, 0)
    if F.octets > 0:
        octets = tl.load(row + u * F.words + F.words - 1, live, 0)
    if F.signs == _INCLUDED:
        signs = octets
    first, second = load_d(row, u, live, COLS, F)
    scale = scale_of(scale_number((high, octets), top, j, g, F), d_of(first, second, F), F)
    first, second = numbers_of(low, signs, high, table, j, g, F)
    return first, second, scale
