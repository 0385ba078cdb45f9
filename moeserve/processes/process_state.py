"""Reads the state of a process from /proc/PID/stat (proc(5)): whether it is stopped, and its CPU time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")  # resolution of the kernel's CPU times


@dataclass(frozen=True, slots=True)
class ProcessState:
    is_stopped: bool  # by SIGSTOP or SIGTSTP
    cpu_seconds: float  # sum of all threads


GONE: Final = ProcessState(is_stopped=False, cpu_seconds=0.0)


def state_of(pid: int) -> ProcessState:
    """Returns the state of a process; GONE if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    return ProcessState(fields[0] == b"T", (int(fields[11]) + int(fields[12])) * TICK_S)
