"""Layouts of integer_gemm.py: which words and numbers each lane has, where they lie in shared memory, and how they are
copied there. A warpgroup multiplies 64 rows of a matrix.

Codes lie in shared memory as the tensor memory accelerator (TMA) swizzles them: pieces of 16 bytes exchanged, so that
the 32 lanes of a load spread over all banks. Activations lie there as warpgroups' products read them.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def powers(first, end):
    """Returns the powers of two times `first` below `end`."""
    return [first << i for i in range((end // first).bit_length() - 1)]


@triton.constexpr_function
def axis(dim, rank, values):
    """Returns one basis vector for each of `values`: zeros, with the value in dimension `dim` of `rank`."""
    return [[value if i == dim else 0 for i in range(rank)] for value in values]


@triton.constexpr_function
def spread(registers, threads, shape):
    """Returns a layout in which each thread has the bases `registers`; the bases `threads` go to lanes first, then to
    warps. Surplus bases become registers; if there are too few, some threads hold the same elements."""
    own = (threads + [[0] * len(shape)] * 7)[:7]
    return gl.DistributedLinearLayout(registers + threads[7:], own[:5], own[5:], [], shape)


@triton.constexpr_function
def product_layout(rank, registers, lanes, shape):
    """Returns a layout that matches the left operand of products: rows by lane and warp, and pairs of rows 8 apart."""
    return gl.DistributedLinearLayout(
        registers + axis(0, rank, [8]), lanes + axis(0, rank, [1, 2, 4]), axis(0, rank, [16, 32]), [], shape
    )


@triton.constexpr_function
def sums_of(tokens):
    """Products [64, tokens] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@triton.constexpr_function
def code_layout(blocks):
    """Words of codes [64 rows, 4 parts, K blocks, 4] in registers: a lane has a part of its rows."""
    registers = axis(3, 4, [1, 2]) + axis(2, 4, powers(1, blocks))
    return product_layout(4, registers, axis(1, 4, [1, 2]), [64, 4, blocks, 4])


@triton.constexpr_function
def by_part():
    """Returns the layout in registers of a tile [64 rows, 4 parts], divided among threads as `code_layout`
    is."""
    return product_layout(2, [], axis(1, 2, [1, 2]), [64, 4])


@triton.constexpr_function
def row_layout(words):
    """Words of a row [64, words] in registers: every lane of a quad has all of its rows."""
    return product_layout(2, axis(1, 2, powers(1, words)), [[0, 0], [0, 0]], [64, words])


@triton.constexpr_function
def box_layout(blocks):
    """Returns the layout of a box of codes [128, 8 * blocks] int32 in shared memory: four parts of 32 rows' `blocks`
    super-blocks, 1 or 2."""
    return gl.NVMMASharedLayout(32 * blocks, 32, 2)


@triton.constexpr_function
def code_memory(blocks, is_gated):
    """Returns the layout in shared memory of words of codes [64 rows, 4 parts, 2 * blocks, 4]. They are in two boxes:
    the first and the last 32 rows; with is_gated the rows of two matrices, eight of each in turn."""
    word, k_block = axis(3, 4, [1, 2]), axis(2, 4, powers(1, 2 * blocks))
    # TMA exchanges pieces of 16 bytes by bit 7 of their place, and by bit 8 if rows have more than two.
    second, third = (0, 1) if blocks == 1 else (1, 2)
    part_and_row = [[0, 1, 0, 0], [0, 2, second, 0], [1, 0, third, 0]]
    rows = [2, 4, 16, 32, 8] if is_gated else [2, 4, 8, 16, 32]
    return gl.SharedLinearLayout(word + k_block + part_and_row + axis(0, 4, rows))


@triton.constexpr_function
def shared_bits(blocks):
    """Words of high bits [64 rows, 2 parts, 2, K blocks, 4] in the registers of the threads that have the codes by
    `code_layout`: two of their parts share one of the high bits."""
    registers = axis(4, 5, [1, 2]) + axis(3, 5, powers(1, blocks))
    return product_layout(5, registers, [[0, 0, 1, 0, 0], [0, 1, 0, 0, 0]], [64, 2, 2, blocks, 4])


@triton.constexpr_function
def row_box_layout(blocks):
    """Returns the layout of a box of 64 rows' codes of `blocks` super-blocks, 1 or 2, [64, parts, 8 * blocks] int32 in
    shared memory: parts whose number is a power of two."""
    return gl.NVMMASharedLayout(32 * blocks, 32, 3)


@triton.constexpr_function
def high_memory(blocks):
    """Words of high bits [64, 2 parts, 2 * blocks, 4] in a box, exchanged as in `code_memory`."""
    words = axis(3, 4, [1, 2]) + axis(2, 4, powers(1, 2 * blocks)) + axis(1, 4, [1])
    rows = axis(0, 4, [1, 2, 4, 8, 16, 32])
    first = 1 if blocks == 1 else 0  # of the rows, that of bit 7
    for row, k_block in zip(rows[first:], powers(1, 2 * blocks), strict=False):
        row[2] = k_block
    return gl.SharedLinearLayout(words + rows)


@triton.constexpr_function
def row_copies(words):
    """Words of a row [64, words], as they are copied: up to four at once."""
    at_once = min(words, 4)
    threads = axis(1, 2, powers(at_once, words)) + axis(0, 2, powers(1, 64))
    return spread(axis(1, 2, powers(1, at_once)), threads, [64, words])


@triton.constexpr_function
def token_copies(tokens, width):
    """Activations or sums [tokens, width] as they are copied."""
    threads = axis(1, 2, powers(8, width)) + axis(0, 2, powers(1, tokens))
    return spread(axis(1, 2, [1, 2, 4]), threads, [tokens, width])


@triton.constexpr_function
def power_of_two(n, least):
    return max(least, 1 << (n - 1).bit_length())
