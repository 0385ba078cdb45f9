"""Renders the metrics once for all scrapes that come together: rendering blocks the event loop for 10 ms, which delays
streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

SHARE: Final = 0.1  # the most of the event loop's time that rendering takes
MAX_REST_S: Final = 1.0  # the longest pause after a rendering


class SharedScrape(Generic[T]):
    """Each caller gets a text that was rendered after the call. A pause follows each rendering; all callers during the
    pause share the next text."""

    def __init__(self, render: Callable[[], T]) -> None:
        self._render = render
        # Keeps the answers to many callers from being written in one turn of the event loop.
        self._one_by_one = asyncio.Lock()
        # The newest text, and when its rendering began (time.monotonic).
        self._last: tuple[float, T] | None = None
        self._rest_until = 0.0

    async def text(self) -> T:
        """Returns a text rendered after this call, which concurrent callers may share. Raises what `render`
        raises."""
        asked = time.monotonic()
        async with self._one_by_one:
            if self._last is None or self._last[0] < asked:
                # Rendering is a task of its own, because its time must not be charged to the first caller's connection.
                # SHARE bounds that time.
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
