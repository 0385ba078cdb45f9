"""Q4_K's words as the left operands of integer_gemm.py: scale * code and mins, exactly, in float16.

Codes: two of a word become 1024 + code by one bitwise operation, then one multiplication and addition gives scale *
(1024 + code) - scale * 1024.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moeserve.kernels.linear.integer_layouts import by_part, code_layout, sums_of

# Operands: eight float16 of a word's four bytes (first the low nibbles of bytes 0 and 2, 1 and 3, then the high ones);
# the word; pairs of scale, scale * -1024, scale / 16, scale * -64.
NIBBLES = gl.constexpr(
    """{ .reg .b32 a, b, w;
    lop3.b32 a, $8, 0x000F000F, 0x64006400, 0xEA; fma.rn.f16x2 a, a, $9, $10; mov.b32 {$0, $1}, a;
    lop3.b32 b, $8, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 b, b, $11, $12; mov.b32 {$4, $5}, b;
    shr.u32 w, $8, 8;
    lop3.b32 a, w, 0x000F000F, 0x64006400, 0xEA; fma.rn.f16x2 a, a, $9, $10; mov.b32 {$2, $3}, a;
    lop3.b32 b, w, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 b, b, $11, $12; mov.b32 {$6, $7}, b; }"""
)
# Operands: the four pairs above; the word of four scales; a selector of one of its bytes, twice, each below 0x64.
SCALES = gl.constexpr(
    """{ .reg .b32 s, least, sixteenth, high; mov.b32 least, 0xE400E400;
    mov.b32 sixteenth, 0x2C002C00; mov.b32 high, 0xD400D400;
    prmt.b32 s, $4, $5, $6; prmt.b32 s, s, 0x64646464, 0x4040; add.rn.f16x2 s, s, least; mov.b32 $0, s;
    mul.rn.f16x2 $1, s, least; mul.rn.f16x2 $2, s, sixteenth; mul.rn.f16x2 $3, s, high; }"""
)
# Operands: two float16; two words of four bytes; a selector of two of these bytes, for bytes 0 and 2.
MINS = gl.constexpr(
    """{ .reg .b32 m, least; mov.b32 least, 0xE400E400;
    prmt.b32 m, $2, $3, $4; lop3.b32 m, m, 0x00FF00FF, 0x64006400, 0xEA; add.rn.f16x2 m, m, least;
    mov.b32 {$0, $1}, m; }"""
)


@gluon.jit
def scale_pairs(word, next_word, selector):
    """Returns the pairs that NIBBLES takes, [rows, 4 parts], of two K blocks' words and a selector of one byte."""
    return gl.inline_asm_elementwise(
        SCALES,
        "=&r,=&r,=&r,=&r,r,r,r",
        [word, next_word, selector],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        True,
        1,
    )


@gluon.jit
def of_part(first, second, layout: gl.constexpr):
    """Joins [rows, 4] of two K blocks to [rows, 4 parts, 2 K blocks, 1], for words of `layout`."""
    both = gl.convert_layout(gl.join(first, second), gl.SliceLayout(3, layout), assert_trivial=True)
    return both[:, :, :, None]


@gluon.jit
def integers(words, pairs, next_pairs, layout: gl.constexpr):
    """Returns scale * code as float16 [rows, 256], columns as products take them. words [rows, 4 parts, 2 K blocks, 4]
    in `layout`; the pairs: of both K blocks' scales."""
    w0, w1, w2, w3, w4, w5, w6, w7 = gl.inline_asm_elementwise(
        NIBBLES, "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r,r,r,r",
        [
            words, of_part(pairs[0], next_pairs[0], layout), of_part(pairs[1], next_pairs[1], layout),
            of_part(pairs[2], next_pairs[2], layout), of_part(pairs[3], next_pairs[3], layout),
        ],
        (gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16), True, 1,
    )  # fmt: skip
    return joined(w0, w1, w2, w3, w4, w5, w6, w7)


@gluon.jit
def joined(w0, w1, w2, w3, w4, w5, w6, w7):
    """Returns float16 [rows, 256], columns as products take them, of the eight numbers of each word [rows, 4 parts, 2 K
    blocks, 4]."""
    low = gl.join(gl.join(w0, w1), gl.join(w2, w3))
    high = gl.join(gl.join(w4, w5), gl.join(w6, w7))
    w = gl.join(low, high)  # rows, parts, K blocks, words, halves of a pair, pairs, nibbles
    return gl.reshape(gl.permute(w, [0, 2, 3, 6, 5, 1, 4]), [w0.shape[0], 256])


@gluon.jit
def low_half(word):
    return (word & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def high_half(word):
    return ((word >> 16) & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def mins_twice(word, next_word, part):
    """Returns float16 [rows, 16]: the eight mins of two words, once for the sums and once for the sums' rounding
    errors. part [1, 4]: 0 .. 3."""
    rows: gl.constexpr = word.shape[0]
    selector = part * 2 + (part * 2 + 1) * 0x100
    even, odd = gl.inline_asm_elementwise(
        MINS, "=&h,=&h,r,r,r", [word, next_word, selector], (gl.float16, gl.float16), True, 1
    )
    m = gl.reshape(gl.join(even, odd), [rows, 8])
    return gl.reshape(gl.permute(gl.join(m, m), [0, 2, 1]), [rows, 16])


@gluon.jit
def by_super_block(words, BLOCKS: gl.constexpr):
    """Takes [rows, n * BLOCKS] apart: four tensors [rows, n], of which BLOCKS count."""
    n: gl.constexpr = words.shape[1] // BLOCKS
    rows: gl.constexpr = words.shape[0]
    if BLOCKS == 1:
        a, b, c, d = words, words, words, words
    elif BLOCKS == 2:
        a, b = gl.split(gl.permute(gl.reshape(words, [rows, 2, n]), [0, 2, 1]))
        c, d = a, b
    else:
        ab, cd = gl.split(gl.permute(gl.reshape(words, [rows, 2, 2 * n]), [0, 2, 1]))
        a, b = gl.split(gl.permute(gl.reshape(ab, [rows, 2, n]), [0, 2, 1]))
        c, d = gl.split(gl.permute(gl.reshape(cd, [rows, 2, n]), [0, 2, 1]))
    return a, b, c, d


@gluon.jit
def codes_by_super_block(words, BLOCKS: gl.constexpr):
    """Takes words of codes [rows, parts, 2 * BLOCKS, 4] apart, likewise."""
    rows: gl.constexpr = words.shape[0]
    parts: gl.constexpr = words.shape[1]
    if BLOCKS == 1:
        a, b, c, d = words, words, words, words
    elif BLOCKS == 2:
        a, b = gl.split(gl.permute(gl.reshape(words, [rows, parts, 2, 2, 4]), [0, 1, 3, 4, 2]))
        c, d = a, b
    else:
        ab, cd = gl.split(gl.permute(gl.reshape(words, [rows, parts, 2, 4, 4]), [0, 1, 3, 4, 2]))
        a, b = gl.split(gl.permute(gl.reshape(ab, [rows, parts, 2, 2, 4]), [0, 1, 3, 4, 2]))
        c, d = gl.split(gl.permute(gl.reshape(cd, [rows, parts, 2, 2, 4]), [0, 1, 3, 4, 2]))
    return a, b, c, d


@gluon.jit
def operands(words, scales, TOKENS: gl.constexpr):
    """Returns scale * code [64, 256] and mins [64, 16], twice, of a super-block as left operands of products [64,
    TOKENS]. words [64, 4, 2, 4] of codes, scales [64, 4]."""
    of_a: gl.constexpr = gl.DotOperandLayout(0, sums_of(TOKENS), 2)
    parts: gl.constexpr = by_part()
    row: gl.constexpr = gl.SliceLayout(1, parts)
    scale_words, min_words = gl.split(gl.reshape(scales, [64, 2, 2]))
    s0, s1 = gl.split(scale_words)  # of the first K block, of the second
    m0, m1 = gl.split(min_words)
    s0 = gl.convert_layout(s0, row, assert_trivial=True)[:, None]
    s1 = gl.convert_layout(s1, row, assert_trivial=True)[:, None]
    m0 = gl.convert_layout(m0, row, assert_trivial=True)[:, None]
    m1 = gl.convert_layout(m1, row, assert_trivial=True)[:, None]
    part = gl.arange(0, 4, layout=gl.SliceLayout(0, parts))[None, :]
    layout: gl.constexpr = code_layout(2)
    words = gl.convert_layout(words, layout, assert_trivial=True)
    weights = integers(words, scale_pairs(s0, s1, part), scale_pairs(s0, s1, part + 4), layout)
    mins = mins_twice(m0, m1, part)
    return gl.convert_layout(weights, of_a, assert_trivial=True), gl.convert_layout(
        mins, of_a, assert_trivial=True
    )
