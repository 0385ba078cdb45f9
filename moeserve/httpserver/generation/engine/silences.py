"""How long the router and the detokenizer have said nothing, in time in which this process would have heard it: one
that was itself stopped, or did not get to its inbox, blames no other. What they said in that time waits in its inbox.

The launcher is watched beside them, by its heartbeat requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final, Literal

from moeserve.processes.silence import LauncherWatch

SILENCE_S: Final = 5.0  # each of them says something once a second at least
TICK_S: Final = 0.25

Speaker = Literal["router", "detokenizer"]


class Silences:
    def __init__(self, launcher: LauncherWatch | None = None) -> None:
        """`launcher` None: there is none, as in tests."""
        self.launcher = LauncherWatch(None, math.inf) if launcher is None else launcher
        self._ticks: dict[
            Speaker, int
        ] = {}  # since it last said something; one that has not yet is not there

    @property
    def longest(self) -> Speaker | None:
        """Who has said nothing for SILENCE_S, if anybody."""
        silent = [name for name, ticks in self._ticks.items() if ticks * TICK_S >= SILENCE_S]
        return max(silent, key=lambda name: self._ticks[name], default=None)

    def heard(self, name: Speaker) -> None:
        self._ticks[name] = 0

    def expect(self, name: Speaker) -> None:
        """It is there, and should soon say something."""
        self._ticks.setdefault(name, 0)

    def lost(self, name: Speaker) -> None:
        """Another one is started, which has not said anything."""
        self._ticks.pop(name, None)

    async def watch(self, is_lost: Callable[[], bool]) -> None:
        """Counts until it is cancelled. However long it was not its turn, that is one tick. `is_lost`: there is nothing
        to serve with, unless the launcher replaces it."""
        while True:
            await asyncio.sleep(TICK_S)
            for name in self._ticks:
                self._ticks[name] += 1
            self.launcher.look(is_needed=is_lost())
