"""Divides a product with a whole matrix into pieces for integer_gemm.py. No torch: the plan counts memory."""

from __future__ import annotations

from moeserve.quantization.quant_type import SUPER_BLOCK

# A piece's rows of the matrix, of activations at most, and super-blocks at once. Measured with the kernel before
# warpgroups: at most 8% behind the fastest tile for each of six products (docs/results/gpu-kernels.md).
PIECE_ROWS, PIECE_TOKENS, SUPER_BLOCKS = 64, 32, 2
LEAST_TOKENS = 8  # of a piece: the fewest columns of a warpgroup's product
MOST_PIECES = 256  # a product of fewer pieces is divided by columns too, into up to this number
MOST_SPLITS = 8


def has_whole_super_blocks(cols: int) -> bool:
    """Returns whether rows of `cols` columns can have integers: whole super-blocks."""
    return cols % SUPER_BLOCK == 0


def pieces_by_columns(rows: int, super_blocks: int, token_blocks: int) -> int:
    """Returns the number of pieces into which each result's columns are divided: a power of two that leaves whole
    steps. The matrix has `rows` rows of `super_blocks`."""
    split, results = 1, -(-rows // PIECE_ROWS) * token_blocks
    while split < MOST_SPLITS and 2 * split * results <= MOST_PIECES:
        if super_blocks % (2 * split * SUPER_BLOCKS):
            break
        split *= 2
    return split


def piece_tokens(tokens: int) -> int:
    """Returns a piece's rows of activations in products of up to `tokens` rows, a power of two."""
    return max(LEAST_TOKENS, min(PIECE_TOKENS, tokens))


def partial_numbers(tokens: int) -> int:
    """Returns the room, in numbers, that partial results of up to `tokens` rows of activations need."""
    return MOST_PIECES * PIECE_ROWS * piece_tokens(tokens)
