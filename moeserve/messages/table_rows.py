"""The worker's report on reads of the n-gram table, which stays in the model file."""

from __future__ import annotations

from typing import Annotated

from moeserve.messages.counts import Counts
from moeserve.messages.metric import Metric


class TableRowCounts(Counts, frozen=True, array_like=True):
    """Counts of one step or several."""

    hits: Annotated[
        int, Metric("counter", "hits", "Rows of the n-gram table that a step used and found in RAM.")
    ] = 0
    reads: Annotated[
        int, Metric("counter", "reads", "Rows of the n-gram table read from the model file.")
    ] = 0
