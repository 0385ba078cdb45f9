"""KeptEvents: the events of a background response, for clients that reconnect to it. EventMemory bounds the memory of
all events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import orjson

from moeserve.httpserver.responses.objects import ResponseEvent
from moeserve.httpserver.transport.errors import ApiError, invalid

EVENT_BYTES: Final = 64 << 20  # of all responses together
OVERHEAD_BYTES: Final = 100  # bytes of an event in addition to its JSON


class KeptEvents:
    """The events of one background response. `EventMemory` writes them; any number of readers follow."""

    def __init__(self) -> None:
        self.size = 0  # bytes
        self.has_ended = False  # no more events come
        self._events: list[bytes] | None = []  # by sequence number; None: the events are no longer kept
        self._news = asyncio.Event()

    def add(self, event: ResponseEvent) -> int:
        """Adds an event. Returns the bytes that it takes."""
        size = 0
        if self._events is not None:
            self._events.append(orjson.dumps(event))
            size = len(self._events[-1]) + OVERHEAD_BYTES
            self.size += size
        self._tell()
        return size

    def end(self) -> None:
        self.has_ended = True
        self._tell()

    def forget(self) -> int:
        """Forgets all events. Returns the bytes that they took. Readers that wait for more events get an error."""
        size, self._events, self.size = self.size, None, 0
        self._tell()
        return size

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def after(self, starting_after: int) -> AsyncGenerator[ResponseEvent, None]:
        """Yields the events after the one with this sequence number, including future events. Raises ApiError 400 if
        the events are not kept."""
        at = starting_after + 1
        while True:
            news = self._news
            while self._events is not None and at < len(self._events):
                event: ResponseEvent = orjson.loads(self._events[at])
                at += 1
                yield event
            if self._events is None:
                raise not_kept()
            if self.has_ended:
                return
            await news.wait()  # set already if an event came while the reader was slow


class EventMemory:
    def __init__(self, most: int = EVENT_BYTES) -> None:
        """`most`: bytes."""
        self._most = most
        self._size = 0
        self._all: dict[KeptEvents, None] = {}  # the oldest first

    def open(self) -> KeptEvents:
        events = KeptEvents()
        self._all[events] = None
        return events

    def add(self, events: KeptEvents, event: ResponseEvent) -> None:
        """Adds an event. If the bound is exceeded, forgets all events of one response after another: of ended responses
        first, the oldest first."""
        self._size += events.add(event)
        while self._size > self._most:
            self._size -= min(
                (one for one in self._all if one.size), key=lambda one: not one.has_ended
            ).forget()

    def close(self, events: KeptEvents) -> None:
        self._size -= events.forget()
        self._all.pop(events, None)


def not_kept() -> ApiError:
    return invalid("stream", "the events of this response are not kept any more; ask for it without stream")
