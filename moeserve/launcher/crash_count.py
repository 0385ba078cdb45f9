"""Decides when to stop restarting processes: after too many deaths within a time window or without a successful
start."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Final

WINDOW_S: Final = 60.0


class CrashCount:
    def __init__(self, most: int) -> None:
        """most: allowed deaths within WINDOW_S, and allowed deaths of one process without a successful start."""
        self._most = most
        self._times: deque[float] = deque(maxlen=most)
        self._failed_starts: Counter[str] = Counter()  # by process, since its last successful start

    def add(self, name: str, *, was_ready: bool) -> str | None:
        """Counts a death. Returns the reason, in words, if it is one too many, else None."""
        self._times.append(time.monotonic())
        self._failed_starts[name] = 0 if was_ready else self._failed_starts[name] + 1
        if len(self._times) == self._most and self._times[-1] - self._times[0] < WINDOW_S:
            return f"processes crashed {self._most} times in a minute"
        if self._failed_starts[name] >= self._most:
            return f"the {name} could not start {self._most} times in a row"
        return None

    def __bool__(self) -> bool:
        """True if a death has been counted."""
        return bool(self._times)

    @property
    def since_last_s(self) -> float:
        """Seconds since the last death. At least one must have been counted."""
        return time.monotonic() - self._times[-1]
