"""Finds processes that hang: the launcher asks each for a heartbeat, and kills one that does not answer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

MOST_MISSED: Final = 4  # unanswered intervals that make a process hung


class Heartbeats:
    """Counts, for each process, the intervals since its oldest unanswered request for a heartbeat. A pause of the whole
    machine counts as one interval, where seconds would count all of it."""

    def __init__(self, limit_s: float) -> None:
        """limit_s: seconds without an answer after which a process counts as hung."""
        self.interval_s = limit_s / MOST_MISSED
        self._missed: dict[str, int] = {}  # process → intervals since its unanswered request
        self._next = time.monotonic() + self.interval_s

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def beat(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Starts a new interval for these processes. Returns the processes to ask, and the processes that hang."""
        self._next = time.monotonic() + self.interval_s
        missed = {name: self._missed[name] + 1 if name in self._missed else 0 for name in names}
        hung = [name for name, times in missed.items() if times >= MOST_MISSED]
        self._missed = {name: times for name, times in missed.items() if name not in hung}
        return [name for name, times in missed.items() if times == 0], hung

    def answered(self, name: str) -> None:
        self._missed.pop(name, None)
