"""One server's totals over all its routers, each of which counts from 0."""

from __future__ import annotations

import msgspec

from moeserve.messages.metric import with_totals_of
from moeserve.messages.router_metrics import LoadReport


class LoadTotals:
    """Adds to a router's totals those of the routers that were lost before it."""

    def __init__(self) -> None:
        self._before = self._newest = LoadReport()

    def of(self, report: LoadReport) -> LoadReport:
        self._newest = with_totals_of(self._before, report)
        return self._newest

    def start_again(self) -> None:
        """The next reports are another router's."""
        self._before = self._newest

    def lost(self, num_continued: int) -> None:
        """Counts the loss of a process that the router's report cannot count."""
        before = self._before
        self._before = msgspec.structs.replace(
            before, engine_losses=before.engine_losses + 1, continued=before.continued + num_continued
        )
