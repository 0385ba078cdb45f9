"""Measures how long the router and the detokenizer have sent nothing.

Only time in which this process reads its inbox counts, because messages wait there while this process is stopped or
busy. The launcher's heartbeat requests are watched in the same way."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final, Literal

from moeserve.processes.silence import LauncherWatch

SILENCE_S: Final = 5.0  # each process sends a message at least once a second
TICK_S: Final = 0.25

Speaker = Literal["router", "detokenizer"]


class Silences:
    def __init__(self, launcher: LauncherWatch | None = None) -> None:
        """`launcher` None: no launcher is watched, as in tests."""
        self.launcher = LauncherWatch(None, math.inf) if launcher is None else launcher
        self._ticks: dict[
            Speaker, int
        ] = {}  # seconds since its last message; a process without an entry has sent none yet

    @property
    def longest(self) -> Speaker | None:
        """Returns the process that has been silent longest, if it has been silent for at least SILENCE_S; else None."""
        silent = [name for name, ticks in self._ticks.items() if ticks * TICK_S >= SILENCE_S]
        return max(silent, key=lambda name: self._ticks[name], default=None)

    def heard(self, name: Speaker) -> None:
        self._ticks[name] = 0

    def expect(self, name: Speaker) -> None:
        """Notes that a process has started, so that its first message is due soon."""
        self._ticks.setdefault(name, 0)

    def lost(self, name: Speaker) -> None:
        """Notes that a process is lost; its successor has not sent anything yet."""
        self._ticks.pop(name, None)

    async def watch(self, is_lost: Callable[[], bool]) -> None:
        """Measures the silences until it is cancelled. A delay of this task counts as one tick, however long it was.
        is_lost: whether a process of the engine is lost."""
        while True:
            await asyncio.sleep(TICK_S)
            for name in self._ticks:
                self._ticks[name] += 1
            self.launcher.look(is_needed=is_lost())
