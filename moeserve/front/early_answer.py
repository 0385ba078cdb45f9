"""An answer that may begin before its model is loaded, so that clients and proxies keep the connection.

A stream of server-sent events gets comments that tell the load's progress. A later failure is an event in the API's
error shape. A JSON answer gets blank lines, which JSON allows, after half a minute. After a later failure the body is
the error's JSON, and breaks off if the server failed (as in `transport/sse.py`). A stream of lines of JSON (Ollama's)
gets blanks before its first line, also after half a minute: its clients parse each line, and some fail at an empty one.
A later failure is a line with an error.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import orjson
from starlette.types import Send

from moeserve.httpserver.transport.sse import (
    BEAT_S,
    BLANK,
    BLANKS_AFTER_S,
    COMMENTS_AFTER_S,
    breaks_off,
    send_part,
)

PROGRESS_S: Final = 1.0  # between two comments with different texts

T = TypeVar("T")


class EarlyAnswer(ABC):
    media_type: bytes
    patience: float  # seconds until the answer begins

    def __init__(self, send: Send) -> None:
        self.have_begun = False
        self._send = send

    async def until(self, awaited: Awaitable[T], undo: Callable[[T], None]) -> T:
        """Returns the result of `awaited`, and sends progress comments or blank lines meanwhile. If this call is
        cancelled after the result has come, `undo` gets the result."""
        working = asyncio.ensure_future(awaited)
        said, said_at = b"", time.monotonic()
        try:
            patience = self.patience
            while not (await asyncio.wait((working,), timeout=patience))[0]:
                patience = PROGRESS_S
                beat = self._beat()
                if beat != said or time.monotonic() - said_at >= BEAT_S:
                    said, said_at = beat, time.monotonic()
                    await self._begin()
                    await send_part(self._send, beat, True)
        except BaseException:
            working.cancel()
            await asyncio.wait((working,))
            if not working.cancelled() and working.exception() is None:
                undo(working.result())
            raise
        return working.result()

    @abstractmethod
    async def fail(self, status: int, body: Mapping[str, Any]) -> None:
        """Ends an answer that has begun. The end is an error in the shape of the answer's API; `status` is its own."""

    @abstractmethod
    def _beat(self) -> bytes: ...

    async def _begin(self) -> None:
        if not self.have_begun:
            self.have_begun = True
            headers = [
                (b"content-type", self.media_type),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})


class EarlyEvents(EarlyAnswer):
    media_type = b"text/event-stream; charset=utf-8"
    patience = COMMENTS_AFTER_S

    def __init__(self, send: Send, text: Callable[[], str]) -> None:
        """`text` returns a sentence that says what the request waits for."""
        super().__init__(send)
        self._text = text

    async def fail(self, status: int, body: Mapping[str, Any]) -> None:
        await send_part(self._send, error_event(body), False)

    def _beat(self) -> bytes:
        line = "".join(character if character.isprintable() else "?" for character in self._text())
        return f": {line}\n\n".encode()


class EarlyJson(EarlyAnswer):
    media_type = b"application/json"
    patience = BLANKS_AFTER_S

    async def fail(self, status: int, body: Mapping[str, Any]) -> None:
        await send_part(self._send, orjson.dumps(body), False, breaks_off=breaks_off(status))

    def _beat(self) -> bytes:
        return b"\n"


class EarlyLines(EarlyAnswer):
    media_type = b"application/x-ndjson"
    patience = BLANKS_AFTER_S

    async def fail(self, status: int, body: Mapping[str, Any]) -> None:
        await send_part(self._send, orjson.dumps(body) + b"\n", False)

    def _beat(self) -> bytes:
        return BLANK


def error_event(body: Mapping[str, Any]) -> bytes:
    """Returns an error as a server-sent event; Anthropic's errors get their type as the event's name."""
    name = b"event: error\n" if body.get("type") == "error" else b""
    return name + b"data: " + orjson.dumps(body) + b"\n\n"
