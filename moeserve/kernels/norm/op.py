"""Launches residual additions and norms, for sandwiched layers too."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.l1_preference import L1_ROWS
from moeserve.kernels.launch import next_power_of_2, pdl
from moeserve.kernels.norm.sandwich import sandwich_inputs_kernel, sandwich_sum_kernel
from moeserve.kernels.norm.sandwich_norms import SandwichNorms
from moeserve.kernels.norm.triton import add_norm_kernel


def add_norm(
    x: Tensor,
    parts: Tensor | None,
    part_weights: Tensor | None,
    part_ids: Tensor | None,
    extra: Tensor | None,
    rows: Tensor | None,
    count: Tensor,
    weight: Tensor | None,
    eps: float,
    y: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    exact: Tensor | None = None,
    *,
    attended: Tensor | None = None,
    centered: bool = False,
) -> None:
    """Computes x[i] += attended[i] + extra[i] + sum_j part_weights[i, j] * parts[i, j]; y[i] = RMSNorm(x[i]) * weight,
    for i < count[0].

    x float32 [n, cols]; parts [n, p, cols]; parts whose part_ids [n, p] are negative do not count. rows int32 [m]:
    output row j is computed from row rows[j] of x, and x stays unchanged; None: all rows. attended, extra: float32 [n,
    cols]. y and codes with scales: GpuActivations [m, cols]. exact: float32 [m, cols], y unrounded. centered: y is of x
    less its mean (LayerNorm). weight None: y = x. eps: added to the mean square under the norm's root, with centered to
    the variance.
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
        attended,
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
        pdl(),
        centered,
        num_warps=norm_warps(size),
        launch_pdl=pdl(),
        prefers_l1=len(some) <= L1_ROWS,
    )


def sandwich_inputs(
    x: Tensor,
    attended: Tensor,
    norms: SandwichNorms,
    count: Tensor,
    eps: float,
    dense: GpuActivations,
    router: Tensor | None,
    experts: GpuActivations | None,
) -> None:
    """Computes x[i] += norm(attended[i]) for i < count[0]; then dense, router and experts = norms of x. x and router
    float32 [n, cols], the others any floats. If parts have no norms of their own, router = dense in float32, and
    experts are not written; without `SandwichNorms.input` dense = x. eps: added to the mean square under the norm's
    root."""
    size = next_power_of_2(x.shape[1])
    parts, into = norms.parts, experts or GpuActivations(None, None, None)
    router_norm = norms.input if parts is None else parts.router_input
    sandwich_inputs_kernel(
        (len(x),), x, attended, norms.attention_output, count,
        norms.input, dense.x, dense.codes, dense.scales,
        None if router is None else router_norm, router,
        None if parts is None else parts.experts_input, into.x, into.codes, into.scales,
        x.shape[1], eps, _post_norm_eps(norms, eps), size, pdl(),
        num_warps=norm_warps(size), launch_pdl=pdl(),
    )  # fmt: skip


def sandwich_sum(
    x: Tensor,
    dense: Tensor | None,
    parts: Tensor | None,
    part_weights: Tensor | None,
    part_ids: Tensor | None,
    extra: Tensor | None,
    rows: Tensor | None,
    count: Tensor,
    norms: SandwichNorms,
    weight: Tensor | None,
    eps: float,
    y: GpuActivations,
) -> None:
    """Computes x[i] = (x[i] + norm(norm(dense[i]) + norm(experts[i]))) * factor, y[i] = RMSNorm(x[i]) * weight, for i
    < count[0]; weight None: y[i] = x[i]. If parts have no norms of their own, without dense: x[i] = (x[i] +
    norm(experts[i])) * factor.

    experts[i] = extra[i] + sum_j part_weights[i, j] * parts[i, j] as in `add_norm`; rows as there. dense [n, 1, cols]
    and parts [n, p, cols] may be columns of wider tensors, with weights and ids to match. eps: added to the mean
    square under the norm's root."""
    cols = x.shape[1]
    size = next_power_of_2(cols)
    some = y.x if y.x is not None else y.codes
    assert some is not None
    of_parts = norms.parts
    sandwich_sum_kernel(
        (len(some),), x, dense, parts, part_weights, part_ids, extra, rows, count,
        None if of_parts is None else of_parts.dense_output, None if of_parts is None else of_parts.experts_output,
        norms.output, norms.factor, weight, y.x, y.codes, y.scales,
        cols, 0 if dense is None else dense.stride(0) // cols, 0 if parts is None else parts.shape[1],
        0 if parts is None else parts.stride(0) // cols, eps, _post_norm_eps(norms, eps), size, pdl(),
        num_warps=norm_warps(size), launch_pdl=pdl(),
    )  # fmt: skip


def norm_in_place(x: Tensor, ones: Tensor, count: Tensor, eps: float) -> None:
    """Computes x[i] = x[i] / sqrt(mean(x[i]^2) + eps) for i < count[0]. x, float32 [n, cols]; ones float32 [cols]."""
    add_norm(x, None, None, None, None, None, count, ones, eps, x, None, None)


def add_to(x: Tensor, parts: Tensor, count: Tensor) -> None:
    """Computes x[i] += sum_j parts[i, j] for i < count[0]. x float32 [n, cols]; parts [n, p, cols]."""
    add_norm(x, parts, None, None, None, None, count, None, 0.0, x, None, None)


def _post_norm_eps(norms: SandwichNorms, eps: float) -> float:
    return eps if norms.post_norm_eps is None else norms.post_norm_eps


def norm_warps(size: int) -> int:
    """Returns the number of warps of a program for a row of `size` columns, rounded up to a power of two."""
    return max(1, min(16, size // 256))
