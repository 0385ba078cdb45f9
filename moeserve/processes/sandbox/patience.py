"""Decides how long a Sandbox waits for its process: until it exceeds its CPU time, gets too little CPU, or is
stopped."""

from __future__ import annotations

import select
import socket
import time
from typing import Final

from moeserve.processes.process_state import TICK_S, state_of

LOOK_S: Final = 0.5  # interval between checks of the process's state


class UsedUp(Exception):
    """The process used up its CPU-time limit."""


class Starved(Exception):
    """The wall-clock limit passed before the process could use its CPU time."""


class Stopped(Exception):
    """The process was stopped by SIGSTOP."""


class Patience:
    """The time limits of one request. `wait` is a `frames.Wait`."""

    def __init__(self, pid: int, line: socket.socket, cpu_seconds: float, wall_seconds: float) -> None:
        """cpu_seconds, wall_seconds: the limits. If the process has already exited, no limit applies: its socket
        reports that."""
        self._pid = pid
        self._line = line
        self.cpu_seconds = cpu_seconds
        self._most_cpu_s = state_of(pid).cpu_seconds + cpu_seconds
        self._cpu_left_s = cpu_seconds
        self._deadline = time.monotonic() + wall_seconds

    def wait(self, event: int) -> None:
        """Waits for a poll event on the socket. Raises UsedUp, Starved or Stopped."""
        poller = select.poll()
        poller.register(self._line, event)
        was_stopped = False
        while not poller.poll(1000 * self._next_look_s()):
            state = state_of(self._pid)
            self._cpu_left_s = self._most_cpu_s - state.cpu_seconds
            if self._cpu_left_s <= 0:
                raise UsedUp
            if state.is_stopped and was_stopped:
                raise Stopped
            was_stopped = state.is_stopped
            if time.monotonic() >= self._deadline:
                raise Starved

    def _next_look_s(self) -> float:
        left = min(self._cpu_left_s, self._deadline - time.monotonic(), LOOK_S)
        return max(left, TICK_S)
