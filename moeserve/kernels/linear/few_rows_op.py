"""Launches the products of a few rows by few_rows.py, where it supports the matrices."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.launch import pdl, warpgroups
from moeserve.kernels.linear.operands import Weight
from moeserve.quantization.table import Q4_K, Q6_K

FEW_ROWS = range(5, 9)
WARP_COLUMNS = 512
WARPS = (1, 2, 4, 8)  # of a program


def takes_few_rows(rows: int, *weights: Weight) -> bool:
    """Returns whether `run_few_rows` supports matrices, of the same columns, for this padded number of rows of int8
    activations, on this GPU: Q4_K and Q6_K; Hopper, where it was measured."""
    warps, rest = divmod(weights[0].cols, WARP_COLUMNS)
    if rows not in FEW_ROWS or rest or warps not in WARPS:
        return False
    return all(w.format in (Q4_K.planes_form, Q6_K.planes_form) for w in weights) and warpgroups()


def run_few_rows(
    codes: Tensor, scales: Tensor, weight: Weight, second: Weight | None, count: Tensor, out: Tensor
) -> None:
    """Launches few_rows.few_rows_kernel. codes: int32 view [n, cols / 4]; out float32 [n, rows of both]."""
    # Gluon's modules are imported where its kernels run.
    from moeserve.kernels.linear.few_rows import few_rows

    warps = weight.cols // WARP_COLUMNS
    tiles = -(-weight.rows // 16) + (0 if second is None else -(-second.rows // 16))
    few_rows(
        (tiles,), codes, scales, weight.codes, weight.scales, weight.supers, count, out,
        None if second is None else second.codes, None if second is None else second.scales,
        None if second is None else second.supers, weight.rows, weight.cols, weight.format == Q6_K.planes_form,
        0 if second is None else second.rows, second is not None and second.format == Q6_K.planes_form, len(out), warps,
        pdl(), num_warps=warps, launch_pdl=pdl(), prefers_l1=True,
    )  # fmt: skip
