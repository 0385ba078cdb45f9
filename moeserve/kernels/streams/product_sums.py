"""The sums of `mixed_products`, from whose sizes a step's buffers follow. No torch."""

from __future__ import annotations

PRODUCT_ROWS = 16  # up to which programs divide a row's columns (docs/results/gpu-kernels.md)
PRODUCT_COLUMNS = 128  # of each stream, in a program


def product_sums(rows: int, hidden: int, values: int) -> tuple[int, int, int]:
    """Returns the shape of the sums of `rows` rows, for a matrix with `values` rows."""
    return rows, -(-hidden // PRODUCT_COLUMNS), 1 + values
