"""When to stop starting processes again: too many deaths within a window of time."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

WINDOW_S: Final = 60.0


class CrashCount:
    def __init__(self, most: int) -> None:
        """`most` deaths within WINDOW_S are too many."""
        self._times: deque[float] = deque(maxlen=most)

    def add(self) -> bool:
        """Counts a death now. Returns whether it is one too many."""
        self._times.append(time.monotonic())
        return len(self._times) == self._times.maxlen and self._times[-1] - self._times[0] < WINDOW_S

    def __len__(self) -> int:
        """Of the last `most`, however long ago."""
        return len(self._times)

    @property
    def since_last_s(self) -> float:
        """Needs one to have been counted."""
        return time.monotonic() - self._times[-1]
