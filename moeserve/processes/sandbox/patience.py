"""How long a Sandbox waits for its process: as long as it computes no more than it may, gets to compute, and is not
stopped."""

from __future__ import annotations

import select
import socket
import time
from typing import Final

from moeserve.processes.process_state import TICK_S, state_of

LOOK_S: Final = 0.5  # between two looks at a process that is waited for


class UsedUp(Exception):
    """It has computed for as long as it may."""


class Starved(Exception):
    """The time by the clock is over, and it has computed less than it may."""


class Stopped(Exception):
    """The process stands still, because it got a SIGSTOP."""


class Patience:
    """For one question. `wait` is a `frames.Wait`."""

    def __init__(self, pid: int, line: socket.socket, cpu_seconds: float, wall_seconds: float) -> None:
        """A process that has ended, and was waited for, does nothing; its line says so."""
        self._pid = pid
        self._line = line
        self.cpu_seconds = cpu_seconds
        self._most_cpu_s = state_of(pid).cpu_seconds + cpu_seconds
        self._cpu_left_s = cpu_seconds
        self._deadline = time.monotonic() + wall_seconds

    def wait(self, event: int) -> None:
        """Raises UsedUp, Starved, Stopped."""
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
