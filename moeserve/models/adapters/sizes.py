"""The memory of adapters, computed from their files' headers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from moeserve.models.adapters.adapter import FLOAT32_BYTES
from moeserve.models.adapters.products import products_of
from moeserve.models.interface import ModelShape

# The CPU kernels' layout: B in panels of this many rows, ranks rounded up to RANK_STEP.
PANEL_ROWS = 32
RANK_STEP = 4
GPU_RANK_STEP = 16  # the GPU kernels round ranks up to this
GPU_ENTRY_BYTES = 32  # bytes of a product's entry in the table
MOST_TABLES = 4  # the most tables per product and input


class PairSize(NamedTuple):
    """`copies` pairs of A [rank, cols] and B [rows, rank]."""

    rank: int
    cols: int
    rows: int
    copies: int = 1


def read_bytes(sizes: Iterable[PairSize]) -> int:
    """Returns the bytes of the matrices in float32, as `read` returns them."""
    return FLOAT32_BYTES * sum(size.copies * size.rank * (size.cols + size.rows) for size in sizes)


def panel_bytes(sizes: Iterable[PairSize]) -> int:
    """Returns the bytes in the CPU kernels' layout (`kernels/lora/reference.py: to_panels`)."""
    floats = 0
    for size in sizes:
        rank, rows = _up(size.rank, RANK_STEP), _up(size.rows, PANEL_ROWS)
        floats += size.copies * rank * (size.cols + rows)
    return FLOAT32_BYTES * floats


def gpu_matrix_bytes(sizes: Iterable[PairSize], float_bytes: int) -> int:
    """Returns the bytes in the GPU kernels' layout (`kernels/lora/triton.py`)."""
    floats = sum(size.copies * _up(size.rank, GPU_RANK_STEP) * (size.cols + size.rows) for size in sizes)
    return float_bytes * floats


def gpu_table_bytes(shape: ModelShape, capacity: int) -> int:
    """Returns the bytes of the table with the addresses of `capacity` adapters' matrices."""
    products = (p for layer in range(shape.num_layers) for p in products_of(shape, layer).values())
    return capacity * GPU_ENTRY_BYTES * sum(product.experts for product in products)


def gpu_rank(rank: int) -> int:
    """Returns the rank, rounded up to a size that the GPU kernels take."""
    return _up(rank, GPU_RANK_STEP)


def workspace_bytes(shape: ModelShape, tokens: int, rank: int) -> int:
    """Returns the bytes of the intermediate vectors A x in a step of `tokens` tokens, for adapters up to `rank`."""
    return max(MOST_TABLES, 2 * shape.top_k) * tokens * _up(rank, RANK_STEP) * FLOAT32_BYTES


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
