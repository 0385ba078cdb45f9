"""LinePace limits how fast lines of batches begin while other answers are in progress.

The router gives background requests a small share of the engine's time. It does not see a line's costs in this process:
reading, templates, tokenising, parsing and writing. With a small model these costs exceed the engine's. So
twice the event loop's time for a line is added to a debt, at most MAX_DEBT_S; it stands for other processes, too. The
debt falls by LINE_SHARE seconds per second, and no line begins while there is debt. From LINGER_S after the last other
answer on, lines begin at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from moeserve.httpserver.transport.metered import Metered

LINE_SHARE: Final = 0.03  # share of one core's time while there are other answers
# A line's cost in other threads and processes, per second of the event loop.
ELSEWHERE: Final = 1.0
MAX_DEBT_S: Final = 0.5  # the highest debt, however much a line costs
FIRST_S: Final = 0.002  # expected cost of a line before any has ended
# How long lines stay limited after the last other answer, because another answer often follows.
LINGER_S: Final = 2.0

T = TypeVar("T")


class LinePace:
    """The debt of all batches. Owned by the event loop's thread."""

    def __init__(self, is_busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        """is_busy: returns whether other answers are in progress. clock: in seconds."""
        self._is_busy = is_busy
        self._clock = clock
        self._debt = 0.0
        self._expected = FIRST_S
        self._paid_at = clock()
        self._busy_until = self._paid_at

    def wait_s(self) -> float:
        """Returns the seconds until a line may begin; 0: now. It becomes shorter if the other answers end."""
        now = self._clock()
        self._debt = max(self._debt - LINE_SHARE * (now - self._paid_at), 0.0)
        self._paid_at = now
        if self._is_busy():
            self._busy_until = now + LINGER_S
        return self._debt / LINE_SHARE if now < self._busy_until else 0.0

    def begin(self, line: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Returns a line's coroutine, wrapped so that its time is added to the debt. Until it ends, the line counts
        with the average cost of earlier lines."""
        advance = self._expected
        self._charge(advance)
        return self._metered(line, advance)

    def add(self, seconds: float) -> None:
        """Adds the time that another process's event loop has spent on a line."""
        self._charge(seconds * (1.0 + ELSEWHERE))

    async def _metered(self, line: Coroutine[Any, Any, T], advance: float) -> T:
        spent = 0.0

        def charge(seconds: float) -> None:
            nonlocal spent
            before, spent = spent, spent + seconds * (1.0 + ELSEWHERE)
            self._charge(max(spent, advance) - max(before, advance))

        try:
            result: T = await Metered(line.__await__(), charge)
            return result
        finally:
            self._charge(min(spent - advance, 0.0))
            self._expected += (min(spent, MAX_DEBT_S) - self._expected) / 8

    def _charge(self, seconds: float) -> None:
        self._debt = min(self._debt + seconds, MAX_DEBT_S)
