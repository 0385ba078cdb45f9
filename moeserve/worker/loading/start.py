"""How a worker begins: from nothing, or in the place of one that was lost; and where its seconds go."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from moeserve.worker.loading.inherited import Inherited


def process_began() -> float:
    """When this process did, or its fork: seconds of time.monotonic(), to a hundredth."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(after_name[19])  # starttime, the 22nd field: see proc(5)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


@dataclass(slots=True)
class StartClock:
    """Seconds of a start by phase, one behind the other."""

    began: float = field(default_factory=process_began)
    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.began

    def ended(self, phase: str) -> None:
        """A phase that has been there before gets longer."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def described(self) -> str:
        """For the log."""
        return ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.seconds.items())


@dataclass(frozen=True, slots=True)
class Start:
    """Not the first: answers wait for this worker, and what the one before has tried need not be tried again."""

    inherited: Inherited = field(default_factory=Inherited)
    is_first: bool = True
    clock: StartClock = field(default_factory=StartClock)
