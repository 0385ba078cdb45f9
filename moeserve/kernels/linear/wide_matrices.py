"""Matrices that the tensor cores multiply also by a few rows of activations. No torch: the plan counts memory.

With more columns than a pass takes, a GEMV unpacks each weight again for each token, or needs more registers than there
are. Smaller matrices have too few tiles to fill a GPU (docs/results/gpu-kernels.md).
"""

from __future__ import annotations

WIDE_COLUMNS = 4096  # a wide matrix has more; a GEMV's pass
WIDE_ROWS = 4096  # and at least as many rows as this
WIDE_GEMV_TOKENS = 2  # the most tokens for which a GEMV is faster: shown for Q4_K


def is_wide(rows: int, cols: int) -> bool:
    return cols > WIDE_COLUMNS and rows >= WIDE_ROWS
