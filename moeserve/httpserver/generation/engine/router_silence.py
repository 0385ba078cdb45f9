"""How long the router has said nothing, in time in which this process would have heard it: one that was itself stopped,
or did not get to its inbox, blames nobody. The load reports of that time wait in its inbox."""

from __future__ import annotations

import asyncio
from typing import Final

SILENCE_S: Final = 5.0  # without a load report, of which a router sends at least one a second
TICK_S: Final = 0.25


class RouterSilence:
    def __init__(self) -> None:
        self._ticks: int | None = None  # since the last report; None: there was none of this router

    @property
    def is_long(self) -> bool:
        return self._ticks is not None and self._ticks * TICK_S >= SILENCE_S

    def report_came(self) -> None:
        self._ticks = 0

    def router_lost(self) -> None:
        self._ticks = None

    async def watch(self) -> None:
        """Counts until it is cancelled. However long it was not its turn, that is one tick."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._ticks is not None:
                self._ticks += 1
