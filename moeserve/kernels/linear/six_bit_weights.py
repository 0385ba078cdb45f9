"""Q6_K's words as the left operand of integer_gemm.py: scale * (code - 32) in float16.

Two codes become 256 + code (low nibbles of a byte) or 64 + code (high ones) by two bitwise operations, then one
multiplication and addition gives scale * (256 + code) - scale * 288, or the like. Both terms are exact; the difference,
of at most 4,096, is rounded once, by less than 2^-11 of it.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moeserve.kernels.linear.integer_layouts import by_part, code_layout, sums_of
from moeserve.kernels.linear.integer_weights import joined, of_part

# Operands: eight float16, in the order of integer_weights.NIBBLES; the word of low bits; that of high bits; by how many
# bits to shift it to the left and to the right; pairs of scale, scale * -288 of the low nibbles, of scale, scale * -96
# of the high ones. A code's place in a float16 is bits 2 .. 7 or 4 .. 9.
SIX_BITS = gl.constexpr(
    """{ .reg .b32 a, w, l, r;
    shl.b32 l, $9, $10; shr.u32 r, $9, $11;
    shl.b32 w, $8, 2; lop3.b32 a, w, 0x003C003C, 0x5C005C00, 0xEA;
    lop3.b32 a, l, 0x00C000C0, a, 0xEA; fma.rn.f16x2 a, a, $12, $13; mov.b32 {$0, $1}, a;
    lop3.b32 a, $8, 0x00F000F0, 0x54005400, 0xEA;
    lop3.b32 a, l, 0x03000300, a, 0xEA; fma.rn.f16x2 a, a, $14, $15; mov.b32 {$4, $5}, a;
    shr.u32 w, $8, 6; lop3.b32 a, w, 0x003C003C, 0x5C005C00, 0xEA;
    lop3.b32 a, r, 0x00C000C0, a, 0xEA; fma.rn.f16x2 a, a, $12, $13; mov.b32 {$2, $3}, a;
    shr.u32 w, $8, 8; lop3.b32 a, w, 0x00F000F0, 0x54005400, 0xEA;
    lop3.b32 a, r, 0x03000300, a, 0xEA; fma.rn.f16x2 a, a, $14, $15; mov.b32 {$6, $7}, a; }"""
)
# Operands: the four pairs above; two words of eight signed scales; which of them belongs to the low nibbles (the next
# one belongs to the high ones). A scale becomes 1024 + 128 + scale.
SIGNED_SCALES = gl.constexpr(
    """{ .reg .b32 a, b, s, next, least, low, high; mov.b32 least, 0xE480E480;
    mov.b32 low, 0xDC80DC80; mov.b32 high, 0xD600D600; add.u32 next, $6, 1;
    xor.b32 a, $4, 0x80808080; xor.b32 b, $5, 0x80808080;
    prmt.b32 s, a, b, $6; prmt.b32 s, s, 0x64646464, 0x4040; add.rn.f16x2 s, s, least;
    mov.b32 $0, s; mul.rn.f16x2 $1, s, low;
    prmt.b32 s, a, b, next; prmt.b32 s, s, 0x64646464, 0x4040; add.rn.f16x2 s, s, least;
    mov.b32 $2, s; mul.rn.f16x2 $3, s, high; }"""
)


@gluon.jit
def signed_scale_pairs(word, next_word, first):
    """Returns the pairs that SIX_BITS takes, [rows, 4 parts], of a K block's two words. first [1, 4]: SIGNED_SCALES'
    last operand."""
    return gl.inline_asm_elementwise(
        SIGNED_SCALES,
        "=&r,=&r,=&r,=&r,r,r,r",
        [word, next_word, first],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        True,
        1,
    )


@gluon.jit
def bits_of_parts(high, BLOCKS: gl.constexpr):
    """Returns words of high bits [64, 2, 2 * BLOCKS, 4], loaded as `shared_bits`, for each part of codes: [64, 4, 2 *
    BLOCKS, 4]."""
    layout: gl.constexpr = high.type.layout.parent
    both = high[:, :, None] + gl.zeros([64, 2, 2, 2 * BLOCKS, 4], gl.int32, layout=layout)
    both = gl.reshape(both, [64, 4, 2 * BLOCKS, 4])
    return gl.convert_layout(both, code_layout(2 * BLOCKS), assert_trivial=True)


@gluon.jit
def six_bit_operand(words, high, scales, TOKENS: gl.constexpr):
    """Returns scale * (code - 32) [64, 256] of a super-block as left operand of products [64, TOKENS]. words, high [64,
    4, 2, 4]: low and high bits; scales [64, 4]."""
    parts: gl.constexpr = by_part()
    row: gl.constexpr = gl.SliceLayout(1, parts)
    layout: gl.constexpr = code_layout(2)
    first_words, next_words = gl.split(gl.reshape(scales, [64, 2, 2]))
    s0, s1 = gl.split(first_words)  # of the first K block, of the second
    t0, t1 = gl.split(next_words)
    s0 = gl.convert_layout(s0, row, assert_trivial=True)[:, None]
    s1 = gl.convert_layout(s1, row, assert_trivial=True)[:, None]
    t0 = gl.convert_layout(t0, row, assert_trivial=True)[:, None]
    t1 = gl.convert_layout(t1, row, assert_trivial=True)[:, None]
    part = gl.arange(0, 4, layout=gl.SliceLayout(0, parts))[None, :]
    pairs = signed_scale_pairs(s0, t0, part * 2)
    next_pairs = signed_scale_pairs(s1, t1, part * 2)
    right = part % 2 * 4 + 2
    left = 8 - right
    w0, w1, w2, w3, w4, w5, w6, w7 = gl.inline_asm_elementwise(
        SIX_BITS, "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r,r,r,r,r,r,r",
        [
            gl.convert_layout(words, layout, assert_trivial=True),
            gl.convert_layout(high, layout, assert_trivial=True),
            of_part(left, left, layout), of_part(right, right, layout),
            of_part(pairs[0], next_pairs[0], layout), of_part(pairs[1], next_pairs[1], layout),
            of_part(pairs[2], next_pairs[2], layout), of_part(pairs[3], next_pairs[3], layout),
        ],
        (gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16), True, 1,
    )  # fmt: skip
    weights = joined(w0, w1, w2, w3, w4, w5, w6, w7)
    return gl.convert_layout(weights, gl.DotOperandLayout(0, sums_of(TOKENS), 2), assert_trivial=True)
