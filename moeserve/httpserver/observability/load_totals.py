"""The counts of a server's routers, one after another, as those of one."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from moeserve.messages.schema import HistogramCounts, LoadReport

# Of a LoadReport: these only grow. The other fields say how things stand.
_TOTALS: Final = (
    *("prompt_tokens", "generation_tokens", "cached_tokens", "repeated_tokens"),
    *("preemptions", "aborts", "steps", "kernels_compiled"),
    *("state_snapshot_hits", "state_snapshot_evictions", "engine_losses", "continued"),
    *("drafts", "draft_tokens", "accepted_draft_tokens"),
    *("beam_searches", "beam_rows", "beam_forks", "beam_restarts"),
)
_HISTOGRAMS: Final = ("decode_step_ms", "prefill_step_ms", "idle_ms")


class LoadTotals:
    """Adds to a router's totals those of the routers that were lost before it."""

    def __init__(self) -> None:
        self._before = self._newest = LoadReport(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    def of(self, report: LoadReport) -> LoadReport:
        self._newest = self._plus_before(report)
        return self._newest

    def start_again(self) -> None:
        """The reports to come are another router's."""
        self._before = self._newest

    def lost(self, num_continued: int) -> None:
        """Counts the loss of a process that the router's report cannot count."""
        before = self._before
        self._before = msgspec.structs.replace(
            before, engine_losses=before.engine_losses + 1, continued=before.continued + num_continued
        )

    def _plus_before(self, report: LoadReport) -> LoadReport:
        before = self._before
        sums: dict[str, Any] = {name: getattr(before, name) + getattr(report, name) for name in _TOTALS}
        sums["expert_cache"] = before.expert_cache.plus(report.expert_cache)
        sums |= {name: _sum(getattr(before, name), getattr(report, name)) for name in _HISTOGRAMS}
        return msgspec.structs.replace(report, **sums)


def _sum(before: HistogramCounts, counts: HistogramCounts) -> HistogramCounts:
    if not before.counts:
        return counts
    if not counts.counts:
        return before
    both = [a + b for a, b in zip(before.counts, counts.counts, strict=True)]
    return HistogramCounts(counts.bounds, both, before.sum + counts.sum)
