"""Decides how long a Sandbox waits for its process: until it exceeds its CPU time, gets too little CPU, or is
stopped."""

from __future__ import annotations

import math
import select
import socket
import time
from typing import Final

from moeserve.processes.process_state import TICK_S, state_of

LOOK_S: Final = 0.5  # interval between checks of the process's state


class UsedUp(Exception):
    """The process used up its CPU-time limit."""


class Starved(Exception):
    """The wall-clock limit passed before the process could use its CPU time, or it used none for too long."""


class Stopped(Exception):
    """The process was stopped by SIGSTOP."""


class Patience:
    """The time limits of one request. `wait` is a `frames.Wait`."""

    def __init__(
        self,
        pid: int,
        line: socket.socket,
        cpu_seconds: float,
        wall_seconds: float,
        idle_seconds: float = math.inf,
    ) -> None:
        """cpu_seconds, wall_seconds: the limits. idle_seconds: how long the process may use no CPU time at all. If the
        process has already exited, no limit applies: its socket reports that."""
        self._pid = pid
        self._line = line
        self.cpu_seconds = cpu_seconds
        self._most_cpu_s = state_of(pid).cpu_seconds + cpu_seconds
        self._cpu_left_s = cpu_seconds
        self._deadline = time.monotonic() + wall_seconds
        self._idle_seconds = idle_seconds
        self._worked = (
            0.0,
            time.monotonic(),
        )  # the CPU time at the last look at which it had grown, and when that was

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
            if self._is_idle(state.cpu_seconds):
                raise Starved
            if state.is_stopped and was_stopped:
                raise Stopped
            was_stopped = state.is_stopped
            if time.monotonic() >= self._deadline:
                raise Starved

    def _is_idle(self, cpu_seconds: float) -> bool:
        before, since = self._worked
        if cpu_seconds > before:
            self._worked = cpu_seconds, time.monotonic()
            return False
        return time.monotonic() - since >= self._idle_seconds

    def _next_look_s(self) -> float:
        left = min(self._cpu_left_s, self._deadline - time.monotonic(), LOOK_S)
        return max(left, TICK_S)
