"""LinePace: how fast the lines of batches begin while other answers are under way.

The router gives background requests a small share of the engine's time. What else a line costs it does not see:
reading, templates, tokenising, parsing and writing. With a small model that is more than the engine's part. So the
event loop's time for each line is a debt, which is paid off at LINE_SHARE of the time that passes, and no line
begins while there is debt. Without other answers lines begin at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from moeserve.httpserver.transport.metered import Metered

LINE_SHARE: Final = 0.03  # of one core's time, beside other answers
# What a line costs in threads and in other processes, beside a second of the event loop's.
ELSEWHERE: Final = 1.0
MAX_DEBT_S: Final = 0.5  # a line whose cost is larger is not waited for longer
FIRST_S: Final = 0.002  # what a line is expected to cost before one has ended
LINGER_S: Final = 2.0  # after the last answer of others: one client's next request often follows its last

T = TypeVar("T")


class LinePace:
    """Owned by the event loop's thread."""

    def __init__(self, is_busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        """`is_busy`: other answers are under way. `clock`: in seconds."""
        self._is_busy = is_busy
        self._clock = clock
        self._debt = 0.0
        self._expected = FIRST_S
        self._paid_at = clock()
        self._busy_until = self._paid_at

    def wait_s(self) -> float:
        """Returns the seconds until a line may begin: 0 for now. Other answers that end meanwhile make it shorter."""
        now = self._clock()
        self._debt = max(self._debt - LINE_SHARE * (now - self._paid_at), 0.0)
        self._paid_at = now
        if self._is_busy():
            self._busy_until = now + LINGER_S
        return self._debt / LINE_SHARE if now < self._busy_until else 0.0

    def begin(self, line: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Returns a line's work, at the lines' expense. What it will cost is expected to be what others have cost."""
        advance = self._expected
        self._charge(advance)
        return self._metered(line, advance)

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
