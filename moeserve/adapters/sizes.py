"""What adapters take in memory, by their files' headers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from moeserve.adapters.adapter import FLOAT32_BYTES
from moeserve.models.interface import ModelShape

# As the CPU's kernels read them: B in panels of so many rows, and ranks a multiple of RANK_STEP.
PANEL_ROWS = 32
RANK_STEP = 4
MOST_TABLES = 4  # of one product over one input


class PairSize(NamedTuple):
    """A [rank, cols] and B [rows, rank], `copies` times."""

    rank: int
    cols: int
    rows: int
    copies: int = 1


def read_bytes(sizes: Iterable[PairSize]) -> int:
    """In float32, as `read` returns them."""
    return FLOAT32_BYTES * sum(size.copies * size.rank * (size.cols + size.rows) for size in sizes)


def panel_bytes(sizes: Iterable[PairSize]) -> int:
    """As the CPU's kernels read them (`kernels/lora/reference.py: to_panels`)."""
    floats = 0
    for size in sizes:
        rank, rows = _up(size.rank, RANK_STEP), _up(size.rows, PANEL_ROWS)
        floats += size.copies * rank * (size.cols + rows)
    return FLOAT32_BYTES * floats


def workspace_bytes(shape: ModelShape, tokens: int, rank: int) -> int:
    """Of what a step of so many tokens has between the two matrices of adapters up to `rank`."""
    return max(MOST_TABLES, 2 * shape.top_k) * tokens * _up(rank, RANK_STEP) * FLOAT32_BYTES


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
