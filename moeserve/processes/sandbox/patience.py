"""How long a Sandbox waits for its process: as long as it computes no more than it may, gets to compute, and is not
stopped."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from typing import Final

LOOK_S: Final = 0.5  # between two looks at a process that is waited for
_SHORTEST_WAIT_S: Final = 0.01  # as exact as the kernel counts CPU time


class UsedUp(Exception):
    """It has computed for as long as it may."""


class Starved(Exception):
    """The time by the clock is over, and it has computed less than it may."""


class Stopped(Exception):
    """It stands still, because somebody has sent it a SIGSTOP."""


class Patience:
    """For one question. `wait` is a `frames.Wait`."""

    def __init__(
        self, process: subprocess.Popen[bytes], line: socket.socket, cpu_seconds: float, wall_seconds: float
    ) -> None:
        self._process = process
        self._line = line
        self.cpu_seconds = cpu_seconds
        self._most_cpu_s = cpu_time(process) + cpu_seconds
        self._cpu_left_s = cpu_seconds
        self._deadline = time.monotonic() + wall_seconds

    def wait(self, event: int) -> None:
        """Raises UsedUp, Starved, Stopped."""
        poller = select.poll()
        poller.register(self._line, event)
        was_stopped = False
        while not poller.poll(1000 * self._next_look_s()):
            state, cpu_s = _look(self._process)
            self._cpu_left_s = self._most_cpu_s - cpu_s
            if self._cpu_left_s <= 0:
                raise UsedUp
            is_stopped = state == b"T"
            if is_stopped and was_stopped:
                raise Stopped
            was_stopped = is_stopped
            if time.monotonic() >= self._deadline:
                raise Starved

    def _next_look_s(self) -> float:
        left = min(self._cpu_left_s, self._deadline - time.monotonic(), LOOK_S)
        return max(left, _SHORTEST_WAIT_S)


def cpu_time(process: subprocess.Popen[bytes]) -> float:
    """Seconds that the process has computed, in all of its threads."""
    return _look(process)[1]


def _look(process: subprocess.Popen[bytes]) -> tuple[bytes, float]:
    """Its state (T: stopped) and its CPU time (proc(5), /proc/PID/stat). Nothing and 0 where it has ended and was
    waited for, as its line says next."""
    try:
        with open(f"/proc/{process.pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return b"", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
