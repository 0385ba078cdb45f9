"""How far rows are from one another."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Distances(NamedTuple):
    """One entry a row."""

    relative: Floats  # |x - y| / the larger of |x| and |y|; infinite where one is not finite and the other is
    largest: Floats  # of the differences
    column: Ints  # where that is


def distances(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> Distances:
    """x, y: [rows, cols]. What is not finite in both does not count."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    finite_x, finite_y = np.isfinite(x), np.isfinite(y)
    gap = _gap(x, y, finite_x, finite_y)
    column = gap.argmax(axis=1) if gap.shape[1] else np.zeros(len(gap), np.int64)
    norms = np.maximum(_norm(np.where(finite_x, x, 0.0)), _norm(np.where(finite_y, y, 0.0)))
    apart = _norm(gap)
    relative = np.divide(apart, norms, out=np.where(apart > 0, np.inf, 0.0), where=norms > 0)
    return Distances(relative, gap[np.arange(len(gap)), column], column)


def _gap(x: Floats, y: Floats, finite_x: Bools, finite_y: Bools) -> Floats:
    gap = np.zeros_like(x)
    both = finite_x & finite_y
    np.subtract(x, y, out=gap, where=both)
    gap[finite_x != finite_y] = np.inf
    return np.abs(gap)


def _norm(x: Floats) -> Floats:
    norms: Floats = np.linalg.norm(x, axis=1)
    return norms


class RoutingDifference(NamedTuple):
    """One entry a row."""

    is_other: Bools  # other experts were chosen
    is_tie: Bools  # and the two router's logits explain it


def routing(
    ids_a: npt.NDArray[Any],
    ids_b: npt.NDArray[Any],
    logits_a: npt.NDArray[Any] | None,
    logits_b: npt.NDArray[Any] | None,
) -> RoutingDifference:
    """ids: [rows, top_k]; logits: [rows, experts], None where a dump has none: then nothing explains another choice.

    A tie: each side's choice is right by its own logits, to within what the two sides' logits of the row differ by.
    """
    is_other = (np.sort(ids_a, axis=1) != np.sort(ids_b, axis=1)).any(axis=1)
    is_tie = np.zeros_like(is_other)
    if logits_a is None or logits_b is None:
        return RoutingDifference(is_other, is_tie)
    for row in np.flatnonzero(is_other):
        only_a, only_b = swapped(ids_a[row], ids_b[row])
        a, b = logits_a[row].astype(np.float64), logits_b[row].astype(np.float64)
        slack = 2 * np.abs(a - b).max() + 1e-6 * np.abs(a).max()
        lost = max(a[only_b].max() - a[only_a].min(), b[only_a].max() - b[only_b].min())
        won = max(a[only_a].max() - a[only_b].min(), b[only_b].max() - b[only_a].min())
        is_tie[row] = lost <= slack and won <= slack
    return RoutingDifference(is_other, is_tie)


def swapped(ids_a: npt.NDArray[Any], ids_b: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """The experts of one row that only A chose, and the experts that only B chose."""
    return np.setdiff1d(ids_a, ids_b), np.setdiff1d(ids_b, ids_a)


def swapped_weight(
    ids_a: npt.NDArray[Any],
    ids_b: npt.NDArray[Any],
    weights_a: npt.NDArray[Any],
    weights_b: npt.NDArray[Any],
) -> float:
    """The part of one row's weights that went to experts which the other side did not choose."""
    only_a, only_b = swapped(ids_a, ids_b)
    in_a, in_b = weights_a[np.isin(ids_a, only_a)].sum(), weights_b[np.isin(ids_b, only_b)].sum()
    return float(max(in_a, in_b))
