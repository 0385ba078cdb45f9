"""The distance between two rows of the same tensor, or between two choices of experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Distances(NamedTuple):
    """Distances of pairs of rows: one entry per pair."""

    relative: Floats  # |x - y| / max(|x|, |y|); infinite if only one of the two is finite
    largest: Floats  # largest difference within the row
    column: Ints  # its column


def distances(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> Distances:
    """Returns the distances between the rows of x and y: [rows, cols]. Elements that are not finite in both do not
    count."""
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
    """Differences in the choice of experts: one entry per pair of rows."""

    is_other: Bools  # other experts were chosen
    is_tie: Bools  # the choice differs because of a near tie


def routing(
    ids_a: npt.NDArray[Any],
    ids_b: npt.NDArray[Any],
    logits_a: npt.NDArray[Any] | None,
    logits_b: npt.NDArray[Any] | None,
) -> RoutingDifference:
    """Compares two sides' choices of experts, and returns for each row whether they differ and whether the difference
    is a tie: bool [rows] each. ids: integers [rows, top_k]; logits: floats [rows, experts], or None if a dump has none:
    then no difference counts as a tie. A difference is a tie if the swapped experts' logits are no farther apart than
    twice the largest difference between the two sides' logits of the row."""
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
    """Returns the experts (integer ids) of one row that only A chose, and those that only B chose."""
    return np.setdiff1d(ids_a, ids_b), np.setdiff1d(ids_b, ids_a)


def swapped_weight(
    ids_a: npt.NDArray[Any],
    ids_b: npt.NDArray[Any],
    weights_a: npt.NDArray[Any],
    weights_b: npt.NDArray[Any],
) -> float:
    """Returns the greater of A's and B's sums of the weights of experts which the other side did not choose, for one
    row. ids integers [top_k], weights floats [top_k]."""
    only_a, only_b = swapped(ids_a, ids_b)
    in_a, in_b = weights_a[np.isin(ids_a, only_a)].sum(), weights_b[np.isin(ids_b, only_b)].sum()
    return float(max(in_a, in_b))
