"""A server's totals over all its router processes, each of which counts from 0, and over all its httpservers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from moeserve.httpserver.observability.kept_file import read_kept, write_kept
from moeserve.messages.metric import HistogramCounts, declared_metrics, with_totals_of
from moeserve.messages.router_metrics import LoadReport


class _Kept(msgspec.Struct, array_like=True):
    before: LoadReport  # totals of the lost routers
    newest: LoadReport  # totals with those of the router that counted last


class LoadTotals:
    """Adds the totals of lost routers to the totals of the current one."""

    def __init__(self, file: Path | None = None) -> None:
        """file: keeps the totals for the next httpserver, and has the previous one's; None: they are
        not kept."""
        self._file = file
        kept = None if file is None else read_kept(file, _Kept)
        self._before = LoadReport() if kept is None else kept.before
        self._newest = LoadReport() if kept is None else kept.newest
        # True until the first report shows whether the previous httpserver's router still runs.
        self._is_router_unknown = kept is not None

    @property
    def newest(self) -> LoadReport:
        """Returns the totals so far. Its gauges are 0 before the first report."""
        return with_totals_of(self._newest, LoadReport())

    def of(self, report: LoadReport) -> LoadReport:
        totals = with_totals_of(self._before, report)
        if self._is_router_unknown:
            self._is_router_unknown = False
            if _is_any_less(totals, self._newest):  # a router's counts only grow, so this is another router
                self._before = self._newest
                totals = with_totals_of(self._before, report)
        self._newest = totals
        return totals

    def start_again(self) -> None:
        """Notes that the next reports come from a new router."""
        self._before = self._newest
        self._is_router_unknown = False

    def lost(self, num_continued: int) -> None:
        """Counts the loss of a process, which the router's report does not contain."""
        before = self._before
        self._before = msgspec.structs.replace(
            before, engine_losses=before.engine_losses + 1, continued=before.continued + num_continued
        )

    def keep(self) -> None:
        """Writes the totals to the file."""
        if self._file is not None:
            write_kept(self._file, _Kept(self._before, self._newest))


def _is_any_less(one: LoadReport, other: LoadReport) -> bool:
    """Returns whether any counter or histogram of `one` is less than the same one of `other`."""
    return any(
        _count(declared.value_in(one)) < _count(declared.value_in(other))
        for declared in declared_metrics(LoadReport)
        if declared.metric.kind != "gauge"
    )


def _count(value: Any) -> float:
    return float(sum(value.counts)) if isinstance(value, HistogramCounts) else float(value)
