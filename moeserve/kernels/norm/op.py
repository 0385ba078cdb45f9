"""Launches residual and norm."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.launch import PDL, next_power_of_2
from moeserve.kernels.norm.triton import add_norm_kernel


def add_norm(
    x: Tensor,
    parts: Tensor | None,
    part_weights: Tensor | None,
    part_ids: Tensor | None,
    extra: Tensor | None,
    rows: Tensor | None,
    count: Tensor,
    weight: Tensor,
    eps: float,
    y: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    exact: Tensor | None = None,
) -> None:
    """x[i] += extra[i] + sum_j part_weights[i, j] * parts[i, j]; y[i] = RMSNorm(x[i]) * weight, for i < count[0].

    x float32 [n, cols]; parts [n, p, cols], those with part_ids [n, p] below 0 left out. With rows int32 [m], i goes
    through them and x stays as it is. y and codes with scales: GpuActivations [m, cols]. exact: float32 [m, cols], the
    same unrounded.
    """
    some = y if y is not None else codes
    assert some is not None
    cols = x.shape[1]
    size = next_power_of_2(cols)
    add_norm_kernel(
        (len(some),),
        x,
        parts,
        part_weights,
        part_ids,
        extra,
        rows,
        count,
        weight,
        y,
        codes,
        scales,
        exact,
        cols,
        0 if parts is None else parts.shape[1],
        eps,
        size,
        PDL,
        num_warps=max(1, min(16, size // 256)),
        launch_pdl=PDL,
    )
