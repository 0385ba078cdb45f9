"""Which processes still answer: the launcher asks each for a heartbeat, and ends one that stands still."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

MOST_MISSED: Final = 4  # intervals without an answer


class Heartbeats:
    """Counts the intervals in which a process owed an answer. Intervals, not seconds: where the whole machine stood
    still for a while, no process has missed more than one."""

    def __init__(self, limit_s: float) -> None:
        """After `limit_s` seconds without an answer a process counts as hung."""
        self.interval_s = limit_s / MOST_MISSED
        self._missed: dict[str, int] = {}  # by process that was asked and has not answered
        self._next = time.monotonic() + self.interval_s

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def beat(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Begins another interval with these processes. Returns who is to be asked, and who hangs."""
        self._next = time.monotonic() + self.interval_s
        missed = {name: self._missed[name] + 1 if name in self._missed else 0 for name in names}
        hung = [name for name, times in missed.items() if times >= MOST_MISSED]
        self._missed = {name: times for name, times in missed.items() if name not in hung}
        return [name for name, times in missed.items() if times == 0], hung

    def answered(self, name: str) -> None:
        self._missed.pop(name, None)
