"""An event loop whose clock jumps to the next timer, so that what waits is tested without waiting: durations are exact,
whatever else the machine does."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Clock:
    """In the place of the module `time`. `thread_seconds` is what `spend` has used up."""

    def __init__(self) -> None:
        self.now = 0.0
        self.thread_seconds = 0.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.thread_seconds

    def spend(self, seconds: float) -> None:
        """As if the thread had computed for `seconds`."""
        self.now += seconds
        self.thread_seconds += seconds

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Like asyncio.run, by this clock. What waits for anything but a timer of the loop is a deadlock."""
        with asyncio.Runner(loop_factory=lambda: _Loop(self)) as runner:
            return runner.run(work)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        super().__init__(_Jumping(clock))

    def time(self) -> float:
        return self._clock.now


class _Jumping(selectors.DefaultSelector):  # its kind depends on the system
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("nothing is due: every task waits for another")
        self._clock.now += timeout
        return []
