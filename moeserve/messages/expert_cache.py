"""The worker's report on its expert cache."""

from __future__ import annotations

from typing import Annotated

from moeserve.messages.counts import Counts
from moeserve.messages.metric import Metric


class ExpertCacheCounts(Counts, frozen=True, array_like=True):
    """Counts of one step or several. Each step counts an expert of a layer once, however many tokens use it. Steps that
    stream experts are not counted."""

    hits: Annotated[
        int,
        Metric(
            "counter",
            "hits",
            "Experts that a step used and found in GPU memory; a step counts each expert of a layer once, and steps "
            "that stream are not counted.",
        ),
    ] = 0
    misses: Annotated[
        int, Metric("counter", "misses", "Experts that a step used and did not find in GPU memory.")
    ] = 0
    promotions: Annotated[
        int, Metric("counter", "promotions", "Experts brought to GPU memory as the text used them.")
    ] = 0
    bytes: Annotated[
        int,
        Metric("counter", "bytes", "Bytes of weights brought to GPU memory by the expert cache.", "bytes"),
    ] = 0

    @property
    def hit_rate(self) -> float:
        """The hit rate, from 0 to 1; 0 if no expert was used."""
        return self.hits / max(1, self.hits + self.misses)
