"""When to stop starting processes again: too many deaths within a window of time, or without a start that worked."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Final

WINDOW_S: Final = 60.0


class CrashCount:
    def __init__(self, most: int) -> None:
        """`most` deaths within WINDOW_S are too many, and so are `most` of processes that were never ready."""
        self._most = most
        self._times: deque[float] = deque(maxlen=most)
        self._failed_starts: Counter[str] = Counter()  # since the last start that worked, by process

    def add(self, name: str, *, was_ready: bool) -> str | None:
        """Counts a death now. Returns in words why it is one too many, or None."""
        self._times.append(time.monotonic())
        self._failed_starts[name] = 0 if was_ready else self._failed_starts[name] + 1
        if len(self._times) == self._most and self._times[-1] - self._times[0] < WINDOW_S:
            return f"processes crashed {self._most} times in a minute"
        if self._failed_starts[name] >= self._most:
            return f"the {name} could not start {self._most} times in a row"
        return None

    def __bool__(self) -> bool:
        """Some death has been counted."""
        return bool(self._times)

    @property
    def since_last_s(self) -> float:
        """Needs one to have been counted."""
        return time.monotonic() - self._times[-1]
