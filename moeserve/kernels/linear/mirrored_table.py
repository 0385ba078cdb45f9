"""Dot products with codes of a table whose upper half is the negative of its lower half (MXFP4's), without masking
bits.

The byte permutation looks up four nibbles at once in eight bytes; for a nibble with its fourth bit set it returns the
replicated sign bit of a byte. The table holds OFFSET + level, which is positive, so those results are zero. Looking up
the codes unchanged thus gives the levels of the lower half, and zeros for codes of the upper half. Looking them up with
the fourth bits flipped gives the levels of the upper half. Both together give all levels.

A word has two codes in each byte, of two fields that share a scale. The permutation returns them alternately, and
the activations are arranged to match. Eight codes and their products take eleven instructions; looked up field by
field, four codes take ten.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.kernels.launch import COMPILED

OFFSET = tl.constexpr(16)


@triton.constexpr_function
def has_mirrored_table(F):
    """Returns whether the format's table is mirrored and both codes of a byte belong to one group."""
    if F.table is None or F.low_bits != 4 or F.group != 32:
        return False
    levels = F.table.levels
    return all(0 <= levels[i] < 16 and levels[8 + i] == -levels[i] for i in range(8))


@triton.constexpr_function
def half_as_number(F, sign):
    """Returns the bytes OFFSET + sign * level of the table's lower half, the first one lowest."""
    return sum((16 + sign * F.table.levels[i]) << 8 * i for i in range(8))


@triton.constexpr_function
def lookup_assembly(F, sign):
    words = []
    for first in (0, 4):
        levels = [16 + sign * F.table.levels[first + i] for i in range(4)]
        words.append(sum(level << 8 * i for i, level in enumerate(levels)))
    return f"{{ .reg .b32 a; mov.b32 a, {words[0]:#x}; prmt.b32 $0, a, {words[1]:#x}, $1; }}"


@triton.constexpr_function
def in_turn_assembly(first):
    return f"prmt.b32 $0, $1, $2, {0x5140 + first * 0x1111:#x};"


@triton.jit
def in_turn(a, b, FIRST: tl.constexpr):
    """Returns an int32 word of bytes a[FIRST], b[FIRST], a[FIRST + 1], b[FIRST + 1], lowest first, elementwise."""
    if COMPILED:
        out = tl.inline_asm_elementwise(in_turn_assembly(FIRST), "=r,r,r", [a, b], tl.int32, True, 1)
    else:
        a, b = a >> 8 * FIRST, b >> 8 * FIRST
        out = (a & 255) | ((b & 255) << 8) | (((a >> 8) & 255) << 16) | (((b >> 8) & 255) << 24)
    return out


@triton.jit
def look_up_half(codes, F: tl.constexpr, SIGN: tl.constexpr):
    """Looks up the four lowest nibbles of each int32 of `codes` in the lower half of F's table. Returns an int32 word
    with a byte for each: OFFSET + SIGN * level (SIGN: 1 or -1), or 0 for a nibble above 7, which belongs to the upper
    half."""
    if COMPILED:
        out = tl.inline_asm_elementwise(lookup_assembly(F, SIGN), "=r,r", [codes], tl.int32, True, 1)
    else:
        out = codes * 0
        for nibble in tl.static_range(4):
            code = (codes >> 4 * nibble) & 15
            level = (
                tl.full(codes.shape, half_as_number(F, SIGN), tl.int64) >> (8 * (code & 7)).to(tl.int64)
            ) & 255
            out |= tl.where(code < 8, level.to(tl.int32) << 8 * nibble, 0)
    return out


@triton.jit
def shifted_levels(codes, others, F: tl.constexpr):
    """Returns an int32 word with a byte OFFSET + level for each of the four lowest nibbles of `codes`. others: the
    codes with their fourth bits flipped."""
    return look_up_half(codes, F, 1) | look_up_half(others, F, -1)
