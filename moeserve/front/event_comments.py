"""An answer of server-sent events that may begin before its model is loaded.

Comments tell the load's progress, so that clients and proxies keep the connection. The status is 200 then; what fails
later is an event of the API's error shape, as in every stream of this server (`transport/sse.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import orjson
from starlette.types import Send

from moeserve.httpserver.transport.sse import BEAT_S, COMMENTS_AFTER_S, send_part

PROGRESS_S: Final = 1.0  # between two comments, where they differ
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

T = TypeVar("T")


class EventComments:
    def __init__(self, send: Send, text: Callable[[], str]) -> None:
        """`text` says what the request waits for."""
        self.have_begun = False
        self._send = send
        self._text = text

    async def until(self, awaited: Awaitable[T], undo: Callable[[T], None]) -> T:
        """Returns what is awaited. Where that takes longer than a moment, comments say why. `undo` gets what came, but
        is wanted no longer, because this call is cancelled."""
        working = asyncio.ensure_future(awaited)
        said, said_at = "", time.monotonic()
        try:
            patience = COMMENTS_AFTER_S
            while not (await asyncio.wait((working,), timeout=patience))[0]:
                patience = PROGRESS_S
                text = self._text()
                if text != said or time.monotonic() - said_at >= BEAT_S:
                    said, said_at = text, time.monotonic()
                    await self._comment(text)
        except BaseException:
            working.cancel()
            await asyncio.wait((working,))
            if not working.cancelled() and working.exception() is None:
                undo(working.result())
            raise
        return working.result()

    async def fail(self, body: Mapping[str, Any]) -> None:
        """Ends the stream with an error in the shape of its API."""
        await send_part(self._send, error_event(body), False)

    async def _comment(self, text: str) -> None:
        if not self.have_begun:
            self.have_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        line = "".join(character if character.isprintable() else "?" for character in text)
        await send_part(self._send, f": {line}\n\n".encode(), True)


def error_event(body: Mapping[str, Any]) -> bytes:
    """Anthropic's events have names; the error's is its type."""
    name = b"event: error\n" if body.get("type") == "error" else b""
    return name + b"data: " + orjson.dumps(body) + b"\n\n"
