"""Launches the activation that joins gate and up products stored side by side."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.gating import GatedForm
from moeserve.kernels.launch import pdl
from moeserve.kernels.linear.gated_rows import gated_rows_kernel

GATED_COLUMNS = 1024  # per program


def gated_rows(products: Tensor, count: Tensor, h: GpuActivations, form: GatedForm) -> None:
    """Computes h[i] = gated(gate, up) for rows i < count[0], whose products float32 [n, 2 * cols] stand side by
    side."""
    n, cols = products.shape[0], products.shape[1] // 2
    gated_rows_kernel(
        (n, -(-cols // GATED_COLUMNS)), products, count, h.x, h.codes, h.scales, cols, form, GATED_COLUMNS, pdl(),
        num_warps=4, launch_pdl=pdl(),
    )  # fmt: skip
