"""Which rows of two dumps are the same token after the same tokens, however they were batched."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeserve.cli.compare_dumps.reader import Rows

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sorted by A's step, then by position: the row that a row comes after is before it.

    A context that a dump computed more than once is paired in order: the first time with the first time.
    """

    a: Ints  # indices into A's rows
    b: Ints  # and B's
    parent: list[int]  # the pair at the position before, -1: none
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
    """The latest of `chosen` before each that has its previous context."""
    last: dict[int, int] = {}
    parents = []
    for index, (context, previous) in enumerate(
        zip(rows.context[chosen].tolist(), rows.previous[chosen].tolist(), strict=True)
    ):
        parents.append(last.get(previous, -1))
        last[context] = index
    return parents
