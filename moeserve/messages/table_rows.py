"""The worker's report on rows of a table of n-grams, which stays in the model file."""

from __future__ import annotations

from typing import Annotated

import msgspec

from moeserve.messages.metric import Metric


class TableRowCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of one step or of several."""

    hits: Annotated[
        int, Metric("counter", "hits", "Rows of the n-gram table that a step used and found in RAM.")
    ] = 0
    reads: Annotated[
        int, Metric("counter", "reads", "Rows of the n-gram table read from the model file.")
    ] = 0

    def plus(self, other: TableRowCounts) -> TableRowCounts:
        return TableRowCounts(self.hits + other.hits, self.reads + other.reads)
