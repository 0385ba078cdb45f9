"""The memory that adapters take, by their files' headers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from moeserve.models.adapters.adapter import FLOAT32_BYTES
from moeserve.models.adapters.products import products_of
from moeserve.models.interface import ModelShape

# As the CPU's kernels read them: B in panels of this many rows, and ranks a multiple of RANK_STEP.
PANEL_ROWS = 32
RANK_STEP = 4
GPU_RANK_STEP = 16  # as the GPU's do
GPU_ENTRY_BYTES = 32  # of a product's place in their table
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


def gpu_matrix_bytes(sizes: Iterable[PairSize], float_bytes: int) -> int:
    """As the GPU's kernels read them (`kernels/lora/triton.py`)."""
    floats = sum(size.copies * _up(size.rank, GPU_RANK_STEP) * (size.cols + size.rows) for size in sizes)
    return float_bytes * floats


def gpu_table_bytes(shape: ModelShape, capacity: int) -> int:
    """Bytes of the table that says where the matrices of `capacity` adapters are."""
    products = (p for layer in range(shape.num_layers) for p in products_of(shape, layer).values())
    return capacity * GPU_ENTRY_BYTES * sum(product.experts for product in products)


def gpu_rank(rank: int) -> int:
    """As the GPU's kernels count it."""
    return _up(rank, GPU_RANK_STEP)


def workspace_bytes(shape: ModelShape, tokens: int, rank: int) -> int:
    """Bytes of what a step of `tokens` tokens holds between the two matrices of adapters up to `rank`."""
    return max(MOST_TABLES, 2 * shape.top_k) * tokens * _up(rank, RANK_STEP) * FLOAT32_BYTES


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
