"""Matches rows of two dumps that hold the same token after the same tokens, whatever else was in their batches."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeserve.cli.compare_dumps.reader import Rows

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Matched rows, sorted by A's step, then by position, so that a row's predecessor comes before it.

    If a dump computed the same context several times, its first time is paired with the other dump's first time, and so
    on.
    """

    a: Ints  # indices into A's rows
    b: Ints  # indices into B's rows
    parent: list[int]  # the pair of the position before; -1: none
    only_a: Ints  # rows without a match
    only_b: Ints

    def __len__(self) -> int:
        return len(self.a)


def match(a: Rows, b: Rows) -> Pairs:
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    for index in reversed(range(len(b.context))):
        waiting[int(b.context[index])].append(index)
    found = [(i, waiting[c].pop()) for i, c in enumerate(a.context.tolist()) if waiting[c]]
    found.sort(key=lambda pair: (a.step[pair[0]], a.position[pair[0]], pair[0]))
    in_a, in_b = (np.array(side, np.int64) for side in (zip(*found, strict=True) if found else ((), ())))
    return Pairs(
        in_a,
        in_b,
        _parents(a, in_a),
        np.setdiff1d(np.arange(len(a.context)), in_a),
        np.setdiff1d(np.arange(len(b.context)), in_b),
    )


def _parents(rows: Rows, chosen: Ints) -> list[int]:
    """Returns, for each chosen row, the index of the latest earlier one that holds its previous context; -1: none."""
    last: dict[int, int] = {}
    parents = []
    for index, (context, previous) in enumerate(
        zip(rows.context[chosen].tolist(), rows.previous[chosen].tolist(), strict=True)
    ):
        parents.append(last.get(previous, -1))
        last[context] = index
    return parents
