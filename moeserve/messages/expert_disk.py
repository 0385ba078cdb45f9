"""The worker's report on experts that are read from disk."""

from __future__ import annotations

from typing import Annotated, Final

from moeserve.messages.counts import Counts
from moeserve.messages.metric import Metric

REPORT_S: Final = 60.0  # seconds, the period over which a slow disk is judged
SLOW_SHARE: Final = 0.5  # seconds of that period that steps must wait for the disk for it to count as slow


class ExpertDiskCounts(Counts, frozen=True, array_like=True):
    """Counts of one step or several. Each step counts an expert of a layer once, however many tokens use it."""

    hits: Annotated[
        int,
        Metric(
            "counter",
            "hits",
            "Experts that a step used and found in RAM, of the layers whose experts are on disk; a step counts each "
            "expert of a layer once.",
        ),
    ] = 0
    misses: Annotated[
        int,
        Metric("counter", "misses", "Experts that a step used and had to wait for, as they were on disk."),
    ] = 0
    bytes: Annotated[
        int, Metric("counter", "bytes", "Bytes of experts read from disk, needed or ahead.", "bytes")
    ] = 0
    waited_ms: Annotated[
        float, Metric("counter", "wait_seconds", "Time that steps waited for experts from disk.", "ms")
    ] = 0.0
    busy_ms: Annotated[
        float,
        Metric(
            "counter", "read_seconds", "Time in which at least one expert was being read from disk.", "ms"
        ),
    ] = 0.0
    predicted: Annotated[
        int,
        Metric(
            "counter",
            "predicted",
            "Experts that a layer was expected to use, by its router on the state before the layer ahead of it.",
        ),
    ] = 0
    predicted_right: Annotated[
        int, Metric("counter", "predicted_right", "Experts that the layer was expected to use, and did.")
    ] = 0
    errors: Annotated[
        int,
        Metric(
            "counter",
            "errors",
            "Experts that could not be read from disk; the requests that needed them ended with an error.",
        ),
    ] = 0

    @property
    def hit_rate(self) -> float:
        """The hit rate, from 0 to 1; 0 if no expert was used."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second of the time in which reads were in progress; 0 without reads."""
        return self.bytes / (self.busy_ms / 1e3) if self.busy_ms else 0.0

    def slowness(self, seconds: float) -> str | None:
        """Returns a sentence if steps mostly waited for the disk; else None. seconds: the time of these counts."""
        if self.waited_ms / 1e3 < SLOW_SHARE * seconds:
            return None
        return (
            f"steps waited for experts from disk for {self.waited_ms / 1e3:.0f} of the last {seconds:.0f} s: it reads "
            f"{self.bytes_per_second / 2**30:.2f} GiB/s, and {self.hit_rate:.0%} of the experts were in RAM; raise "
            "--expert-ram, or use a faster disk"
        )
