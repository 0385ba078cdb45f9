"""uvicorn's HTTP/1.1 connection, with a bound on the request's head: uvicorn itself would keep headers of any
size, and wait for ever for a head that does not end."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from moeserve.httpserver.errors import ApiError

MAX_HEAD_BYTES: Final = 64 << 10  # request line and headers
HEAD_TIMEOUT_S: Final = 30.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request's head takes more than its bytes (431) or its time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0  # of the head that is arriving
        self._head_timer: asyncio.TimerHandle | None = None  # set while one is awaited or arriving

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_is_here(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self) -> None:
        error = ApiError(431, f"the request's headers must have at most {MAX_HEAD_BYTES} bytes together")
        body = orjson.dumps(error.body())
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
