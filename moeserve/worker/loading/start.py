"""Describes a worker's start: whether it is the first or replaces a lost worker, and how long each phase takes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from moeserve.worker.loading.inherited import Inherited


def process_began() -> float:
    """Returns when this process or fork started: seconds of time.monotonic(), resolution 10 ms."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(after_name[19])  # starttime, the 22nd field: see proc(5)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


@dataclass(slots=True)
class StartClock:
    """Durations of a start's consecutive phases, in seconds."""

    began: float = field(default_factory=process_began)
    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.began

    def ended(self, phase: str) -> None:
        """Ends a phase. A repeated name adds to its duration."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def described(self) -> str:
        """Returns a description for the log."""
        return ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.seconds.items())


@dataclass(frozen=True, slots=True)
class Start:
    """Context of a worker's start. is_first False: it replaces a lost worker; because answers wait for it, tests are
    not repeated."""

    inherited: Inherited = field(default_factory=Inherited)
    is_first: bool = True
    clock: StartClock = field(default_factory=StartClock)
