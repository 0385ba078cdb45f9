"""SlowDisk: whether steps mostly wait for experts from disk, as the router's reports tell."""

from __future__ import annotations

import time

from moeserve.messages.expert_disk import REPORT_S, ExpertDiskCounts


class SlowDisk:
    """Judges the last REPORT_S seconds each time that they have passed. Owned by the event loop's thread."""

    def __init__(self) -> None:
        self._before = ExpertDiskCounts()
        self._judged_at = time.monotonic()
        self.note: str | None = None  # what /health says of it

    def told(self, totals: ExpertDiskCounts) -> None:
        """Takes the server's counts since its start."""
        at = time.monotonic()
        seconds = at - self._judged_at
        if seconds < REPORT_S:
            return
        self.note = totals.since(self._before).slowness(seconds)
        self._before, self._judged_at = totals, at
