"""The time that drafting spends on the CPU, on a machine where other programs may run.

Drafting takes tens of microseconds at a time. While the whole process is paused for other programs, wall time passes
and no CPU time of this process; the process spends at least as much CPU time as wall time while it works, because at
least one of its threads runs. So the lesser of the two leaves out pauses of the whole process. CPU time is that of all
threads: a pause of one of them is still counted while others compute.
"""

from __future__ import annotations

import time
from typing import NamedTuple


class SpentTime(NamedTuple):
    """The time from `begin` on."""

    wall: float  # seconds, by arbitrary clocks
    cpu: float  # of all threads

    @classmethod
    def begin(cls) -> SpentTime:
        return cls(time.perf_counter(), time.process_time())

    def ms(self, *, on_gpu: bool = False) -> float:
        """Milliseconds since `begin` without pauses of the whole process: wall time or the process's CPU time,
        whichever is less. on_gpu: a GPU worked, until whose end the host may have slept: wall time, with pauses."""
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        return (wall if on_gpu else min(wall, cpu)) * 1e3
