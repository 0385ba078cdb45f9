"""How products with whole matrices are divided among pieces."""

from __future__ import annotations

import itertools

from moeserve.kernels.linear.integer_pieces import (
    MOST_PIECES,
    PIECE_ROWS,
    SUPER_BLOCKS,
    partial_numbers,
    piece_tokens,
    pieces_by_columns,
)


def test_pieces_have_whole_steps_and_room() -> None:
    """For any matrix and number of rows."""
    for rows, supers, tokens in itertools.product(
        (1, 64, 200, 512, 2048, 5120, 40_000), (1, 2, 3, 8, 12, 16, 20, 64, 68), (4, 8, 16, 32, 64)
    ):
        block = piece_tokens(tokens)
        blocks = -(-tokens // block)
        split = pieces_by_columns(rows, supers, blocks)
        pieces = -(-rows // PIECE_ROWS) * blocks * split
        assert split == 1 or supers % (split * SUPER_BLOCKS) == 0
        assert split == 1 or pieces <= MOST_PIECES
        assert split == 1 or pieces * PIECE_ROWS * block <= partial_numbers(tokens)


def test_small_matrices_are_divided_by_columns() -> None:
    assert pieces_by_columns(2048, 16, 1) == 8
    assert pieces_by_columns(2048, 16, 2) == 4
    assert pieces_by_columns(5120, 8, 2) == 1
    assert pieces_by_columns(5120, 68, 1) == 2
