"""SlowDisk: whether steps spend most of their time waiting for experts from disk. The router's reports tell."""

from __future__ import annotations

import time

from moeserve.messages.expert_disk import REPORT_S, ExpertDiskCounts


class SlowDisk:
    """Judges each interval of REPORT_S seconds at its end. Owned by the event loop's thread."""

    def __init__(self) -> None:
        self._before = ExpertDiskCounts()
        self._judged_at = time.monotonic()
        self.note: str | None = None  # the note in /health's answer

    def told(self, totals: ExpertDiskCounts) -> None:
        """Takes the totals since the server's start."""
        at = time.monotonic()
        seconds = at - self._judged_at
        if seconds < REPORT_S:
            return
        self.note = totals.since(self._before).slowness(seconds)
        self._before, self._judged_at = totals, at
