"""Layouts of integer_gemm.py: which words and numbers each lane has, where they lie in shared memory, and how they are
copied there.

Two rules of the hardware decide about shared memory (measured, docs/results/gpu-kernels.md): what lies together in the
matrix stays together, because copies of 16 bytes that part neighbours fetch every sector of 32 bytes twice; and the 32
lanes of a load spread over all banks.
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
    """Returns bases along one dimension."""
    return [[value if i == dim else 0 for i in range(rank)] for value in values]


@triton.constexpr_function
def spread(registers, threads, warps, shape):
    """A layout whose threads have `registers`, and take the bases `threads` lane by lane, then warp by warp; more bases
    are registers' too, and with fewer some threads have the same."""
    number = 5 + warps.bit_length() - 1
    own = (threads + [[0] * len(shape)] * number)[:number]
    return gl.DistributedLinearLayout(registers + threads[number:], own[:5], own[5:], [], shape)


@triton.constexpr_function
def product_layout(rank, rows, warps, registers, lanes, shape):
    """A layout that agrees with the left operand of products: rows by lane and warp, and pairs of rows 8 apart."""
    return gl.DistributedLinearLayout(
        registers + axis(0, rank, [8, *powers(16 * warps, rows)]),
        lanes + axis(0, rank, [1, 2, 4]),
        axis(0, rank, powers(16, 16 * warps)),
        [],
        shape,
    )


@triton.constexpr_function
def mma_layout(warps):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@triton.constexpr_function
def code_layout(rows, warps, blocks):
    """Words of codes [rows, 4 parts, K blocks, 4] in registers: a lane has a part of its rows."""
    registers = axis(3, 4, [1, 2]) + axis(2, 4, powers(1, blocks))
    return product_layout(4, rows, warps, registers, axis(1, 4, [1, 2]), [rows, 4, blocks, 4])


@triton.constexpr_function
def by_part(rows, warps):
    """[rows, 4 parts] as in `code_layout`."""
    return product_layout(2, rows, warps, [], axis(1, 2, [1, 2]), [rows, 4])


@triton.constexpr_function
def row_layout(rows, warps, words):
    """Words of a row [rows, words] in registers: every lane of a quad has all of its rows."""
    return product_layout(2, rows, warps, axis(1, 2, powers(1, words)), [[0, 0], [0, 0]], [rows, words])


@triton.constexpr_function
def code_copies(rows, warps, blocks):
    """The same words as they are copied: the K blocks of a row's part lie together."""
    threads = axis(2, 4, powers(1, blocks)) + axis(1, 4, [1, 2]) + axis(0, 4, powers(1, rows))
    return spread(axis(3, 4, [1, 2]), threads, warps, [rows, 4, blocks, 4])


@triton.constexpr_function
def code_memory(rows, blocks, turned):
    """Words of codes [rows, 4 parts, K blocks, 4] in shared memory: a row's part of these K blocks lies together, as in
    the matrix. So that lanes that read one K block of two rows' parts use all banks, odd rows' K blocks are exchanged
    in pairs and, `turned`, odd parts' too: what is read there as the first K block is the second."""
    of_part = [[0, 1, 1 if turned else 0, 0], [0, 2, 2 if blocks > 2 else 0, 0]]
    of_row = [[1, 0, 1, 0], *axis(0, 4, powers(2, rows))]
    return gl.SharedLinearLayout(axis(3, 4, [1, 2]) + axis(2, 4, powers(1, blocks)) + of_part + of_row)


@triton.constexpr_function
def row_copies(rows, warps, words):
    """Words of a row [rows, words], as they are copied: up to four at once."""
    at_once = min(words, 4)
    threads = axis(1, 2, powers(at_once, words)) + axis(0, 2, powers(1, rows))
    return spread(axis(1, 2, powers(1, at_once)), threads, warps, [rows, words])


@triton.constexpr_function
def token_layout(tokens, warps):
    """A super-block's activations [tokens, 256] in registers, in the order of integer_order.py."""
    return gl.DistributedLinearLayout(
        axis(1, 2, [1, 2, 4, 32, 64, 128]) + axis(0, 2, powers(8, tokens)),
        axis(1, 2, [8, 16]) + axis(0, 2, [1, 2, 4]),
        [[0, 0] for _ in powers(1, warps)],
        [],
        [tokens, 256],
    )


@triton.constexpr_function
def token_copies(tokens, warps, width):
    """Activations or sums [tokens, width] as they are copied."""
    threads = axis(1, 2, powers(8, width)) + axis(0, 2, powers(1, tokens))
    return spread(axis(1, 2, [1, 2, 4]), threads, warps, [tokens, width])


@triton.constexpr_function
def token_memory(tokens):
    """Activations in shared memory. Odd tokens have their pieces of 64 bytes exchanged, so that two tokens' pieces are
    in different banks."""
    return gl.SharedLinearLayout([*axis(1, 2, powers(1, 256)), [1, 32], *axis(0, 2, powers(2, tokens))])


@triton.constexpr_function
def power_of_two(n, least):
    return max(least, 1 << (n - 1).bit_length())
