"""A server's totals over all its router processes, each of which counts from 0."""

from __future__ import annotations

import msgspec

from moeserve.messages.metric import with_totals_of
from moeserve.messages.router_metrics import LoadReport


class LoadTotals:
    """Adds the totals of lost routers to the totals of the current one."""

    def __init__(self) -> None:
        self._before = self._newest = LoadReport()

    def of(self, report: LoadReport) -> LoadReport:
        self._newest = with_totals_of(self._before, report)
        return self._newest

    def start_again(self) -> None:
        """Notes that the next reports come from a new router."""
        self._before = self._newest

    def lost(self, num_continued: int) -> None:
        """Counts the loss of a process, which the router's report does not contain."""
        before = self._before
        self._before = msgspec.structs.replace(
            before, engine_losses=before.engine_losses + 1, continued=before.continued + num_continued
        )
