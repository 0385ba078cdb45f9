"""Compares two dumps: every tensor of every matched row, in the order in which a step computes them.

If the two sides chose different experts, but the router's logits were so close that rounding explains it (a near tie),
this alone is not a difference. After a near tie the row's values really differ, as do the values of every later row
that attends to it. Such rows have a wider tolerance, in proportion to the weight of the swapped experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moeserve.cli.compare_dumps.distance import Bools, Ints, distances, routing, swapped, swapped_weight
from moeserve.cli.compare_dumps.matching import Pairs, match
from moeserve.cli.compare_dumps.reader import Dump, DumpError
from moeserve.worker.recording.dump_format import (
    EMBEDDING,
    IDS,
    LAYER_TENSORS,
    LOGITS,
    OUTPUT,
    ROUTER,
    SAMPLED,
    SAMPLED_ROWS,
    WEIGHTS,
    of_layer,
)

Array = npt.NDArray[Any]
_Both = tuple[Array, Array]  # A's and B's
LOGIT_ROWS = 8  # rows compared at a time: 10 MB of float64 per dump at a vocabulary of 151,936
NEVER = 1 << 30


class Tolerances(NamedTuple):
    """Tolerances of a row's relative distance. Past a near tie: plain + tie x the weight of the experts that were
    swapped."""

    plain: float
    tie: float


class TensorPlace(NamedTuple):
    layer: int | None  # None: a tensor from before or after the layers
    tensor: str

    @property
    def name(self) -> str:
        return self.tensor if self.layer is None else of_layer(self.layer, self.tensor)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first row in which a tensor of two dumps differs by more than the limit. The relative distance is |A - B|
    over the greater of |A| and |B| (Euclidean norms of the row); largest: the largest absolute difference between two
    numbers of the row."""

    place: TensorPlace
    pair: int
    limit: float  # on the relative distance
    relative: float = np.inf
    largest: float = np.inf
    # The column of the largest difference, and the values of A and B in it.
    values: tuple[int, float, float] | None = None
    # Experts that only A chose, and experts that only B chose.
    experts: tuple[list[int], list[int]] | None = None


@dataclass(slots=True)
class Cell:
    """A tensor of a layer, over all steps. Counts are of rows."""

    rows: int = 0  # compared
    tied: int = 0  # of them past a near tie
    worst: float = 0.0  # relative distance, of rows that are not past one
    worst_tied: float = 0.0  # and of those that are
    differ: int = 0
    other: int = 0  # with other experts
    ties: int = 0  # of these near ties


@dataclass(slots=True)
class Result:
    a: Dump
    b: Dump
    pairs: Pairs
    cells: dict[TensorPlace, Cell] = field(default_factory=dict)
    first: Difference | None = None
    num_logits: int = 0  # rows
    same_top: int = 0  # with the same most likely token
    num_sampled: int = 0  # for which both dumps have a token
    same_sampled: int = 0
    # For "A" and "B": the first tensor that is not finite, and the pair of rows.
    not_finite: dict[str, tuple[TensorPlace, int]] = field(default_factory=dict)


def compare(a: Dump, b: Dump, tolerances: Tolerances) -> Result:
    """Compares two dumps. Raises DumpError if they cannot be compared."""
    shared = a.tensors & b.tensors
    if not any(name in (EMBEDDING, LOGITS) or name.startswith("layers.") for name in shared):
        raise DumpError(
            "the two dumps have no values in common; name dumps of one model (docs/reference/debug-dumps.md has the "
            "tensors' names)"
        )
    for name in sorted(shared):
        if a.width(name) != b.width(name):
            raise DumpError(
                f"{name} has {a.width(name)} columns in {a.folder} and {b.width(name)} in {b.folder}; these are "
                "two models: name dumps of one"
            )
    pairs = match(a.rows, b.rows)
    if not len(pairs):
        raise DumpError(
            "the two dumps have no rows of the same prompt in common; send both servers the same prompts"
        )
    comparison = _Comparison(Result(a, b, pairs), shared, tolerances)
    comparison.run()
    return comparison.result


class _Comparison:
    def __init__(self, result: Result, shared: set[str], tolerances: Tolerances) -> None:
        self.result = result
        self._shared, self._tolerances = shared, tolerances
        self._layers = min(result.a.num_layers, result.b.num_layers)
        # By pair: the layer of the first near tie in the row or in one before it, and the greatest weight that any of
        # them swapped.
        self._tied_at = np.full(len(result.pairs), NEVER)
        self._swapped = np.zeros(len(result.pairs))

    def run(self) -> None:
        steps = self.result.a.rows.step[self.result.pairs.a]
        for step in np.unique(steps):
            self._compare_step(np.flatnonzero(steps == step))

    def _compare_step(self, pairs: Ints) -> None:
        """Compares one step. pairs: all matched pairs whose row of A is in this step."""
        self._inherit_ties(pairs)
        if EMBEDDING in self._shared:
            self._judge(TensorPlace(None, EMBEDDING), pairs, *self._read(EMBEDDING, pairs))
        for layer in range(self._layers):
            self._compare_layer(layer, pairs)
        if {SAMPLED_ROWS, LOGITS} <= self._shared:
            self._compare_logits(pairs)

    def _compare_layer(self, layer: int, pairs: Ints) -> None:
        names = {tensor: of_layer(layer, tensor) for tensor in LAYER_TENSORS}
        values = {t: self._read(name, pairs) for t, name in names.items() if name in self._shared}
        for tensor in values:
            if tensor not in (IDS, WEIGHTS, OUTPUT):
                self._judge(TensorPlace(layer, tensor), pairs, *values[tensor])
        same = np.ones(len(pairs), np.bool_)
        if IDS in values:
            ids = values[IDS]
            same = ~self._compare_routing(layer, pairs, ids, values.get(ROUTER), values.get(WEIGHTS))
            if WEIGHTS in values:
                x, y = (
                    np.take_along_axis(w, i.argsort(axis=1), 1)
                    for w, i in zip(values[WEIGHTS], ids, strict=True)
                )
                self._judge(TensorPlace(layer, WEIGHTS), pairs[same], x[same], y[same])
        if OUTPUT in values:
            x, y = values[OUTPUT]
            self._judge(TensorPlace(layer, OUTPUT), pairs[same], x[same], y[same])

    def _compare_routing(
        self, layer: int, pairs: Ints, ids: _Both, logits: _Both | None, weights: _Both | None
    ) -> Bools:
        """Compares the chosen experts and returns the rows where they differ."""
        found = routing(*ids, *(logits or (None, None)))
        cell, wrong = self._cell(TensorPlace(layer, IDS)), np.flatnonzero(found.is_other & ~found.is_tie)
        cell.rows += len(pairs)
        cell.other += int(found.is_other.sum())
        cell.ties += int(found.is_tie.sum())
        cell.differ += len(wrong)
        if len(wrong) and self.result.first is None:
            only_a, only_b = swapped(ids[0][wrong[0]], ids[1][wrong[0]])
            self.result.first = Difference(
                TensorPlace(layer, IDS), int(pairs[wrong[0]]), 0.0, experts=(only_a.tolist(), only_b.tolist())
            )
        for row in np.flatnonzero(found.is_other):
            pair, weight = pairs[row], 1.0
            if weights is not None:
                weight = swapped_weight(ids[0][row], ids[1][row], weights[0][row], weights[1][row])
            self._tied_at[pair] = min(self._tied_at[pair], layer)
            self._swapped[pair] = max(self._swapped[pair], weight)
        if found.is_other.any():
            self._inherit_ties(pairs)
        return found.is_other

    def _compare_logits(self, pairs: Ints) -> None:
        r, both = self.result, self.result.pairs
        pairs = pairs[(r.a.rows.sampled[both.a[pairs]] >= 0) & (r.b.rows.sampled[both.b[pairs]] >= 0)]
        for first in range(0, len(pairs), LOGIT_ROWS):
            part = pairs[first : first + LOGIT_ROWS]
            x, y = (d.sampled_rows_of(LOGITS, rows[part]) for d, rows in ((r.a, both.a), (r.b, both.b)))
            self._judge(TensorPlace(None, LOGITS), part, x, y)
            r.num_logits += len(part)
            r.same_top += int((x.argmax(axis=1) == y.argmax(axis=1)).sum())
            if SAMPLED in self._shared:
                tokens = [
                    d.sampled_rows_of(SAMPLED, rows[part]) for d, rows in ((r.a, both.a), (r.b, both.b))
                ]
                both_sampled = (tokens[0] >= 0) & (tokens[1] >= 0)
                r.num_sampled += int(both_sampled.sum())
                r.same_sampled += int((both_sampled & (tokens[0] == tokens[1])).sum())

    def _judge(self, place: TensorPlace, pairs: Ints, x: Array, y: Array) -> None:
        """Records the distances of one tensor's rows. x, y: [len(pairs), cols]."""
        found, tied = distances(x, y), self._is_tied(place, pairs)
        limits = self._tolerances.plain + np.where(tied, self._tolerances.tie * self._swapped[pairs], 0.0)
        self._note_not_finite(place, pairs, x, y)
        cell = self._cell(place)
        cell.rows += len(pairs)
        cell.tied += int(tied.sum())
        cell.worst = max(cell.worst, found.relative[~tied].max(initial=0.0))
        cell.worst_tied = max(cell.worst_tied, found.relative[tied].max(initial=0.0))
        bad = np.flatnonzero(found.relative > limits)
        cell.differ += len(bad)
        if len(bad) and self.result.first is None:
            row = bad[0]
            column = int(found.column[row])
            self.result.first = Difference(
                place,
                int(pairs[row]),
                float(limits[row]),
                float(found.relative[row]),
                float(found.largest[row]),
                (column, float(x[row, column]), float(y[row, column])),
            )

    def _is_tied(self, place: TensorPlace, pairs: Ints) -> Bools:
        if place.tensor == EMBEDDING:
            return np.zeros(len(pairs), np.bool_)
        tied: Bools = self._tied_at[pairs] < (self._layers if place.layer is None else place.layer)
        return tied

    def _inherit_ties(self, pairs: Ints) -> None:
        """Copies near ties from the row at the position before to each row. That row's own ties must be complete."""
        for pair in pairs.tolist():
            parent = self.result.pairs.parent[pair]
            if parent >= 0:
                self._tied_at[pair] = min(self._tied_at[pair], self._tied_at[parent])
                self._swapped[pair] = max(self._swapped[pair], self._swapped[parent])

    def _note_not_finite(self, place: TensorPlace, pairs: Ints, x: Array, y: Array) -> None:
        for side, values in (("A", x), ("B", y)):
            if side not in self.result.not_finite:
                rows = np.flatnonzero(~np.isfinite(values).all(axis=1))
                if len(rows):
                    self.result.not_finite[side] = place, int(pairs[rows[0]])

    def _read(self, name: str, pairs: Ints) -> _Both:
        r = self.result
        return r.a.rows_of(name, r.pairs.a[pairs]), r.b.rows_of(name, r.pairs.b[pairs])

    def _cell(self, place: TensorPlace) -> Cell:
        return self.result.cells.setdefault(place, Cell())
