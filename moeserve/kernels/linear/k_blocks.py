"""Dot products of rows in planes with int8 activations on the ordinary cores, for the GEMV kernels.

Tiles are [KB K blocks, BR rows, NB rows, 4 words] with KB * BR = the program's threads: a thread has one K block of
its NB rows. It first loads everything it needs of them (`load_k_blocks`), then unpacks. A kernel that loads before
it waits for the previous kernel has its weights when the activations arrive. Four codes and four int8 activations
make one dp4a; the group's scale is applied after the dot product: acc += xs * (s * (x . q) - m * sum x).

The order of the dimensions, and the thread's row in all indices (`k_block_indices`), make Triton use the same
layout for weights, scales and activations; each conversion would go through shared memory.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005
# (Triton compiles no starred tuples.)

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import COMPILED
from moeserve.kernels.linear.mirrored_table import OFFSET, has_mirrored_table, in_turn, shifted_levels
from moeserve.kernels.planes.books_triton import (
    d_of,
    eight_signs,
    entry_words,
    is_plus,
    load_d,
    row_words,
    scale_number,
    scale_of,
    with_signs,
)
from moeserve.kernels.planes.triton import (
    BYTE_ONES,
    WORD_ONES,
    e4m3_numbers,
    merge_codes,
    scale_and_min,
    super_word,
)
from moeserve.quantization.codebook import Signs

INCLUDED = tl.constexpr(int(Signs.INCLUDED))
HIGH_7 = tl.constexpr(int(Signs.HIGH_7))


@triton.jit
def dp4a(a, b, c):
    """Returns c plus the dot product of a's and b's four signed bytes, elementwise. a, b, c: int32."""
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
def dp4a_unsigned(a, b, c):
    """Returns c plus the dot product of a word of four unsigned bytes (a) and one of signed bytes."""
    if COMPILED:
        out = tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1
        )
    else:
        out = c
        for byte in tl.static_range(4):
            out += ((a >> (8 * byte)) & 255) * ((b << (24 - 8 * byte)) >> 24)
    return out


@triton.jit
def expert_planes(codes, scales, supers, expert, ROWS: tl.constexpr, COLS: tl.constexpr, F: tl.constexpr):
    """Returns pointers to an expert's first row; expert: int64."""
    if F is None:
        codes += expert * (ROWS * COLS)
    else:
        codes += expert * (ROWS * F.parts * ((COLS + 127) // 128) * 4)
        scales += expert * (ROWS * row_words(F, COLS))
        if F.has_super:
            supers += expert * (ROWS * ((COLS + 255) // 256))
    return codes, scales, supers


@triton.jit
def tile_rows(first_row, ROWS: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr):
    """Returns [1, BR, NB] row numbers, -1 beyond ROWS."""
    r = first_row + tl.arange(0, BR)[None, :, None] * NB + tl.arange(0, NB)[None, None, :]
    return r if ROWS % (BR * NB) == 0 else tl.where(r < ROWS, r, -1)


@triton.jit
def k_block_indices(KB: tl.constexpr, BR: tl.constexpr):
    """Returns 0 .. KB - 1 as [KB, BR, 1]."""
    return tl.arange(0, KB)[:, None, None] + tl.zeros([1, BR, 1], tl.int32)


@triton.jit
def load_k_blocks(codes, scales, supers, r, u, live, COLS: tl.constexpr, F: tl.constexpr):
    """Loads K blocks u [KB, BR, 1] of rows r [1, BR, NB]: a tuple of all parts' words [.., 4], a tuple of scale
    words, and the super-blocks' words; zeros where not live. Arguments: pointers to the expert's first row, or one
    per K block; codes as int32. For a codebook type the scale words end with the words of d, and the pointer to the
    codebook is returned instead of the super-blocks' words."""
    K_BLOCKS: tl.constexpr = (COLS + 127) // 128
    code = codes + r * (F.parts * K_BLOCKS * 4) + u * 4
    code = code[:, :, :, None] + tl.arange(0, 4)[None, None, None, :]
    row = scales + r * row_words(F, COLS)
    word = row + u * F.words
    if F.words == 1:
        # Otherwise a thread would load several K blocks' words, which then go to the others through shared memory.
        word = tl.max_contiguous(word, [1, 1, 1])
    PARTS: tl.constexpr = F.parts
    WORDS: tl.constexpr = F.words
    parts, words = (), ()
    for p in tl.static_range(PARTS):
        parts = parts + (tl.load(code + p * (K_BLOCKS * 4), live[:, :, :, None], 0),)
    for w in tl.static_range(WORDS):
        words = words + (tl.load(word + w, live, 0),)
    if F.is_book:
        words = words + load_d(row, u, live, COLS, F)
        d = supers
    elif F.has_super:
        d = super_word(tl.load(supers + r * ((COLS + 255) // 256) + u // 2, live, 0), u, F)
    else:
        d = words[0]
    return parts, words, d


@triton.jit
def field_codes(parts, f: tl.constexpr, F: tl.constexpr):
    """Returns the codes of field f, four to an int32 word, merged from the parts (words of low and of high bits) that
    hold them. F: the block format."""
    low = parts[f * F.low_bits // 8]
    high = low
    if F.high_bits > 0:
        high = parts[F.low_bits + f * F.high_bits // 8]
    return merge_codes(low, high, f * F.low_bits % 8, f * F.high_bits % 8, F, WORD_ONES)


@triton.jit
def group_scale(words, d, g: tl.constexpr, F: tl.constexpr):
    """Returns float32 s and m of group g."""
    WORDS: tl.constexpr = F.words
    if F.has_min_word:
        word, min_word = words[0], words[1]
    elif WORDS == 0:
        word, min_word = d, d
    else:
        word, min_word = words[g // F.groups_per_word], words[WORDS - 1]
    return scale_and_min(word, min_word, d, g, F)


@triton.jit
def load_field(x_codes, at, live):
    """Loads 16 activations from offset `at` [KB, BR, 1] on: words [.., 4] and their sum, float32."""
    x = tl.load(
        x_codes + (at // 4)[:, :, :, None] + tl.arange(0, 4)[None, None, None, :], live[:, :, :, None], 0
    )
    sums = dp4a(tl.full(x.shape, WORD_ONES, tl.int32), x, tl.zeros_like(x))
    return x, tl.sum(sums, 3).to(tl.float32)


@triton.jit
def load_eights(x_codes, at, live, WHICH: tl.constexpr):
    """Loads int32 word WHICH (0 or 1) of each eight of 32 int8 activations, from `at` [KB, BR, 1] on: [.., 4]."""
    words = (at // 4)[:, :, :, None] + 2 * tl.arange(0, 4)[None, None, None, :] + WHICH
    return tl.load(x_codes + words, live[:, :, :, None], 0)


@triton.jit
def load_columns(x_codes, x_scales, at, live, F: tl.constexpr):
    """Loads 32 activations from offset `at` [KB, BR, 1] on, zeros where not live: both fields' words and sums, and
    the scale. For a codebook type: the first and the second words of all eights, and the eights' sums, int32, twice."""
    if F.is_book:
        x0, x1 = load_eights(x_codes, at, live, 0), load_eights(x_codes, at, live, 1)
        ones = tl.full(x0.shape, WORD_ONES, tl.int32)
        sum0 = dp4a(ones, x1, dp4a(ones, x0, tl.zeros_like(x0)))
        sum1 = sum0
    else:
        x0, sum0 = load_field(x_codes, at, live)
        x1, sum1 = load_field(x_codes, at + 16, live)
    return x0, x1, sum0, sum1, tl.load(x_scales + at // 32, live, 0.0)


@triton.jit
def mirrored_dot(words, x0, x1, F: tl.constexpr):
    """Returns, int32 for each word of eight codes, the dot product of (OFFSET + level of each code) with the
    activations. x0, x1: words of four signed bytes, for the field in the lower nibbles and the one in the upper. F: the
    block format, whose table of levels is mirrored."""
    others = words ^ -0x77777778  # 0x88888888
    dot = dp4a(shifted_levels(words, others, F), in_turn(x0, x1, 0), tl.zeros_like(words))
    return dp4a(shifted_levels(words >> 16, others >> 16, F), in_turn(x0, x1, 2), dot)


@triton.jit
def dot_eights(columns, parts, high, scales, table, j, H: tl.constexpr, F: tl.constexpr):
    """Returns the dot products of group H's four eights with the activations of `load_columns`: int32 [.., 4]. parts:
    words of codes; high, scales: the K blocks' word of the group's high bytes and last word of scales."""
    x0, x1, sums = columns[0], columns[1], columns[2]
    LOW: tl.constexpr = F.low_parts
    octets = ()
    for p in tl.static_range(LOW):
        octets = octets + ((parts[p] >> (8 * H)) & 255,)
    signs = scales
    if F.parts > F.low_parts:
        signs = parts[LOW] >> (8 * H)
    q0, q1 = entry_words(octets, signs, high, table, j, H, F)
    zero = tl.zeros_like(q0)
    if F.has_delta:
        # Bytes of 8 * entry + 127, from which 126 or 128 is subtracted.
        dots = dp4a_unsigned(q1, x1, dp4a_unsigned(q0, x0, zero)) + (2 * is_plus(high, j, H, F) - 128) * sums
    else:
        if F.signs != INCLUDED:
            if F.signs == HIGH_7:
                # One group's signs: all groups' at once would keep words in registers beside the indices' bits.
                minus = eight_signs(signs, F, BYTE_ONES)
            else:
                minus = eight_signs(parts[LOW], F, WORD_ONES) >> (8 * H)
            q0, q1 = with_signs(q0, minus), with_signs(q1, minus >> 4)
        dots = dp4a(q1, x1, dp4a(q0, x0, zero))
    return dots


@triton.jit
def multiply_eights(columns, parts, words, table, H: tl.constexpr, F: tl.constexpr):
    """Returns the products, float32, of group H of loaded K blocks of a codebook type with the activations of
    `load_columns`. parts, words: the blocks' code and scale words; table: the codebook."""
    j = tl.arange(0, 4)[None, None, None, :]
    HIGH: tl.constexpr = H // 2 if F.high_words == 2 else 0
    WORDS: tl.constexpr = F.words
    LAST: tl.constexpr = F.words - 1 if F.words > 0 else 0
    LAST_PART: tl.constexpr = F.parts - 1
    high, scales = words[HIGH], words[LAST]
    wide_high, wide_scales = high[:, :, :, None], scales[:, :, :, None]
    dots = dot_eights(columns, parts, wide_high, wide_scales, table, j, H, F)
    d = d_of(words[WORDS], words[WORDS + 1], F)
    if F.group == 32:
        top = tl.sum(((parts[LAST_PART] >> 7) & WORD_ONES) << j, 3)  # a byte for each group
        n = scale_number((high, scales), (top >> (8 * H)) & 15, 0, H, F)
        out = scale_of(n, d, F) * tl.sum(dots, 3).to(tl.float32)
    else:
        n = scale_number((wide_high, wide_scales), dots, j, H, F)
        out = d * (F.eighths / 8) * tl.sum((2 * n + 1) * dots, 3).to(tl.float32)
    return out


@triton.jit
def dot_e4m3(codes, x, acc):
    """Returns acc, float32, plus the dot product of words of four 8-bit floats and of four signed bytes."""
    for byte in tl.static_range(4):
        acc += e4m3_numbers(codes >> (8 * byte)) * ((x << (24 - 8 * byte)) >> 24).to(tl.float32)
    return acc


@triton.jit
def multiply_columns(columns, k_blocks, H: tl.constexpr, F: tl.constexpr):
    """Returns the dot product of loaded columns with the 32 columns H of loaded K blocks: float32 [KB, BR, NB]."""
    if F.is_book:
        parts, words, table = k_blocks
        out = columns[4] * multiply_eights(columns, parts, words, table, H, F)
    else:
        out = multiply_fields(columns, k_blocks, H, F)
    return out


@triton.jit
def multiply_fields(columns, k_blocks, H: tl.constexpr, F: tl.constexpr):
    """Returns the same as `multiply_columns` (float32 products of group H with the activations), for a type that stores
    its codes in fields of bits, not as indices of a codebook."""
    x0, x1, sum0, sum1, xs = columns
    parts, words, d = k_blocks
    s0, m0 = group_scale(words, d, H * 32 // F.scale_group, F)
    if has_mirrored_table(F):
        dots = tl.sum(mirrored_dot(parts[H], x0, x1, F), 3).to(tl.float32)
        return xs * (s0 * (dots - OFFSET * (sum0 + sum1)))
    q0, q1 = field_codes(parts, 2 * H, F), field_codes(parts, 2 * H + 1, F)
    if F.e4m3:
        return xs * (s0 * tl.sum(dot_e4m3(q1, x1, dot_e4m3(q0, x0, tl.zeros(q0.shape, tl.float32))), 3))
    zero = tl.zeros_like(q0)
    if F.scale_group >= 32:
        out = s0 * tl.sum(dp4a(q1, x1, dp4a(q0, x0, zero)), 3).to(tl.float32)
        if F.has_min:
            out -= m0 * (sum0 + sum1)
    else:
        s1, m1 = group_scale(words, d, H * 2 + 1, F)
        dot0, dot1 = tl.sum(dp4a(q0, x0, zero), 3), tl.sum(dp4a(q1, x1, zero), 3)
        out = s0 * dot0.to(tl.float32) + s1 * dot1.to(tl.float32)
        if F.has_min:
            out -= m0 * sum0 + m1 * sum1
    return xs * out


@triton.jit
def dot_k_blocks(acc, k_blocks, u, x_codes, x_scales, COLS: tl.constexpr, F: tl.constexpr):
    """Returns acc, float32 [KB, BR, NB], plus the dot products of loaded K blocks u [KB, BR, 1] with a row of
    activations."""
    for h in tl.static_range(4):
        column = u * 128 + h * 32
        acc += multiply_columns(load_columns(x_codes, x_scales, column, column < COLS, F), k_blocks, h, F)
    return acc


@triton.jit
def dot_floats(codes, x, r, COLS: tl.constexpr, BK: tl.constexpr):
    """Returns rows r [1, BR, NB] of a float matrix times x: float32 [BR, NB]."""
    rows = tl.reshape(r, [r.shape[1] * r.shape[2]])
    partial = tl.zeros([rows.shape[0], BK], tl.float32)
    for first in tl.static_range(0, COLS, BK):
        k = first + tl.arange(0, BK)
        w = tl.load(codes + rows[:, None] * COLS + k[None, :], (k < COLS)[None, :], 0.0)
        partial += w.to(tl.float32) * tl.load(x + k, k < COLS, 0.0).to(tl.float32)[None, :]
    return tl.reshape(tl.sum(partial, 1), [r.shape[1], r.shape[2]])
