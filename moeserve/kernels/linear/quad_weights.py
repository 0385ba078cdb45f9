"""Unpacks weights in quad order (quad_order.py), as bfloat16 from the first instruction on (paired_weights.py), in
the registers from which a warpgroup's product takes them.

Everything from the words to the weights is elementwise, a join, a reshape or a broadcast, so that Triton moves the
product's layout up to the loads. An operation with a number that depends on the loop would prevent that, and all
weights would go through shared memory or shuffles; such numbers are loaded instead.
"""

# mypy: ignore-errors
# (Triton compiles no starred tuples.)

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import COMPILED
from moeserve.kernels.linear.paired_weights import scale_and_negative_min, word_assembly
from moeserve.kernels.planes.triton import BYTE_ONES, high_half, low_half, merge_codes, scale_and_min


@triton.jit
def pair_of(value):
    """Packs float32 into a word of two bfloat16, both the value."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [value], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def by_word(values, KB: tl.constexpr):
    """Expands [BN, KB] of K blocks to [BN, 4, KB] of the words of a quad's lanes."""
    BN: tl.constexpr = values.shape[0]
    return tl.reshape(tl.broadcast_to(values[:, :, None, None], [BN, KB, 4 // KB, KB]), [BN, 4, KB])


@triton.jit
def quad_scales(
    scales, supers, selectors, r, first, q, COLS: tl.constexpr, F: tl.constexpr, KB: tl.constexpr
):
    """Returns four tensors [BN, KB], for rows r [BN] and K blocks `first` to first + KB - 1: the words with the scales
    of low parts 2 q and 2 q + 1, the words with their mins, the super-blocks' words, and which byte of a word is the
    first one of these parts (from `selectors`). For a type that has no mins or no super-blocks, the words with the
    scales stand in their places."""
    K_BLOCKS: tl.constexpr = (COLS + 127) // 128
    BN: tl.constexpr = r.shape[0]
    GROUPS: tl.constexpr = 64 // F.group
    row = scales + r[:, None] * (K_BLOCKS * F.words) + first * F.words
    if F.has_min_word:
        both = tl.load(row + tl.arange(0, KB * 2)[None, :])
        word, min_word = tl.split(tl.reshape(both, [BN, KB, 2]))
        at = tl.load(selectors + q * GROUPS + tl.zeros([BN, KB], tl.int32))
    else:
        word = tl.load(row + (tl.arange(0, KB) * F.words)[None, :] + q * GROUPS // F.groups_per_word)
        min_word = word
        at = word
    d = word
    if F.has_super:
        d = tl.load(supers + r[:, None] * ((COLS + 255) // 256) + first // 2 + tl.arange(0, KB // 2)[None, :])
        d = tl.reshape(tl.broadcast_to(d[:, :, None], [BN, KB // 2, 2]), [BN, KB])
    return word, min_word, d, at


@triton.jit
def times_byte_at(d, word, at):
    """Multiplies like paired_weights.times_byte, for the byte that the selector `at` picks: float32 d * byte."""
    number = tl.inline_asm_elementwise(
        "prmt.b32 $0, 0x47000000, $1, $2;", "=r,r,r", [word, at], tl.float32, is_pure=True, pack=1
    )
    return tl.fma(d, number, d * -32768.0)


@triton.jit
def group_scale(word, min_word, d, at, g: tl.constexpr, F: tl.constexpr):
    """Returns float32 s and -m [BN, KB] of the iteration's group g; -m is undefined if m is s * offset."""
    if F.has_min_word:
        if COMPILED:
            s = times_byte_at(low_half(d), word, at + 16 * g)
            m = times_byte_at(high_half(d ^ -0x80000000), min_word, at + 16 * g)
        else:
            byte = (at >> 4 & 3) + g
            s = low_half(d) * ((word >> 8 * byte) & 255).to(tl.float32)
            m = -high_half(d) * ((min_word >> 8 * byte) & 255).to(tl.float32)
    elif COMPILED:
        s, m = scale_and_negative_min(word, min_word, d, g, F)
    else:
        s, m = scale_and_min(word, min_word, d, g, F)
        m = -m
    return s, m


@triton.jit
def byte_weights(low, high, s, m, byte: tl.constexpr, i: tl.constexpr, F: tl.constexpr, dtype: tl.constexpr):
    """Returns the weights of one byte of each word, by way of float32."""
    low_byte, high_byte = (low >> 8 * byte) & 255, (high >> 8 * byte) & 255
    codes = merge_codes(low_byte, high_byte, i * F.low_bits % 8, i * F.high_bits % 8, F, BYTE_ONES)
    return (codes.to(tl.float32) * s + m).to(dtype)


@triton.jit
def field_weights(
    low, high, word, min_word, d, at, i: tl.constexpr, F: tl.constexpr, KB: tl.constexpr, dtype: tl.constexpr
):
    """Returns the weights [BN, 16 * KB] of field i in words low and high [BN, 4, KB]; word, min_word, d, at: from
    quad_scales. Without inline assembly, in the interpreter, in any float dtype."""
    BN: tl.constexpr = low.shape[0]
    s, m = group_scale(word, min_word, d, at, i * 16 // F.group, F)
    if not COMPILED:
        scale, least = by_word(s, KB), by_word(m, KB)
        w0 = byte_weights(low, high, scale, least, 0, i, F, dtype)
        w1 = byte_weights(low, high, scale, least, 1, i, F, dtype)
        w2 = byte_weights(low, high, scale, least, 2, i, F, dtype)
        w3 = byte_weights(low, high, scale, least, 3, i, F, dtype)
    else:
        if F.has_own_min:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                word_assembly(F, i),
                "=h,=h,=h,=h,r,r,r,r",
                [low, high, by_word(pair_of(s), KB), by_word(pair_of(m), KB)],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                True,
                1,
            )
        else:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                word_assembly(F, i),
                "=h,=h,=h,=h,r,r,r",
                [low, high, by_word(pair_of(s), KB)],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                True,
                1,
            )
    w = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # rows, lanes, words, columns, halves
    return tl.reshape(tl.permute(w, [0, 2, 4, 1, 3]), [BN, 16 * KB])


@triton.jit
def part_words(codes, r, first, p, COLS: tl.constexpr, F: tl.constexpr, KB: tl.constexpr):
    """Returns words [BN, 4, KB] of part p of rows r [BN] and K blocks `first` on. codes: int32, the expert's first
    row."""
    K_BLOCKS: tl.constexpr = (COLS + 127) // 128
    row = codes + r[:, None] * (F.parts * K_BLOCKS * 4) + p * (K_BLOCKS * 4) + first * 4
    # Loaded in two dimensions, because otherwise Triton does not see that a row's words are neighbours.
    return tl.reshape(tl.load(row + tl.arange(0, 4 * KB)[None, :]), [r.shape[0], 4, KB])


@triton.jit
def quad_weights(
    codes, scales, supers, selectors, r, first, q,
    COLS: tl.constexpr, F: tl.constexpr, KB: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Returns weights [BN, 64 * KB] of low parts 2 q and 2 q + 1 of K blocks `first` on, four fields one after
    another. For types with 4 low bits and at most 2 high ones: one high part has these fields. selectors: int32
    [4], for the bytes of a word (experts/quads.py)."""
    tl.static_assert(F.low_bits == 4)
    tl.static_assert(F.high_bits == 0 or F.high_bits == 2)
    BN: tl.constexpr = r.shape[0]
    word, min_word, d, at = quad_scales(scales, supers, selectors, r, first, q, COLS, F, KB)
    low = part_words(codes, r, first, 2 * q, COLS, F, KB)
    high = low
    if F.high_bits > 0:
        high = part_words(codes, r, first, F.low_bits + q, COLS, F, KB)
    w0 = field_weights(low, high, word, min_word, d, at, 0, F, KB, dtype)
    w1 = field_weights(low, high, word, min_word, d, at, 1, F, KB, dtype)
    low = part_words(codes, r, first, 2 * q + 1, COLS, F, KB)
    if F.high_bits == 0:
        high = low
    w2 = field_weights(low, high, word, min_word, d, at, 2, F, KB, dtype)
    w3 = field_weights(low, high, word, min_word, d, at, 3, F, KB, dtype)
    w = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.permute(w, [0, 2, 3, 1]), [BN, 64 * KB])
