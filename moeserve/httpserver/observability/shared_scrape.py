"""One text of metrics for all clients that ask at a time: rendering takes 10 ms of the event loop's thread, which
streams need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

SHARE: Final = 0.1  # of the thread's time, at most
MAX_REST_S: Final = 1.0  # seconds of rest behind a text, at most


class SharedScrape(Generic[T]):
    """Each caller gets a text that was rendered after it asked. Behind each text the thread has a rest, and all callers
    that ask meanwhile share the next text."""

    def __init__(self, render: Callable[[], T]) -> None:
        self._render = render
        # Answers of many callers are not written in one turn of the event loop.
        self._one_by_one = asyncio.Lock()
        self._last: tuple[float, T] | None = None  # when it was begun, by time.monotonic
        self._rest_until = 0.0

    async def text(self) -> T:
        """Raises what `render` raises."""
        asked = time.monotonic()
        async with self._one_by_one:
            if self._last is None or self._last[0] < asked:
                # In a task of its own, so that the thread's time is bounded here and not charged to the first caller.
                self._last = await asyncio.create_task(self._rendered())
            return self._last[1]

    async def _rendered(self) -> tuple[float, T]:
        await asyncio.sleep(max(0.0, self._rest_until - time.monotonic()))
        begun, before = time.monotonic(), time.thread_time()
        try:
            return begun, self._render()
        finally:
            seconds = time.thread_time() - before
            self._rest_until = time.monotonic() + min(seconds * (1 / SHARE - 1), MAX_REST_S)
