"""The kernel's view of a process: whether it is stopped, and how long it has computed (proc(5), /proc/PID/stat)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")  # the kernel counts no finer


@dataclass(frozen=True, slots=True)
class ProcessState:
    is_stopped: bool  # by a SIGSTOP or SIGTSTP
    cpu_seconds: float  # in all of its threads


GONE: Final = ProcessState(is_stopped=False, cpu_seconds=0.0)


def state_of(pid: int) -> ProcessState:
    """GONE where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    return ProcessState(fields[0] == b"T", (int(fields[11]) + int(fields[12])) * TICK_S)
