"""uvicorn's HTTP/1.1 connection with bounds on a request's head and on the time of its body.

uvicorn itself keeps headers and trailers of any size, and waits for ever for a head or a body that does not end.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final

import httptools
import orjson
from starlette.types import Receive, Scope, Send
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.idle_connections import IdleConnections
from moeserve.httpserver.transport.sse import JsonResponse

# Of the request line and headers; the same again for trailers and chunk extensions.
MAX_HEAD_BYTES: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 10.0
BODY_TIMEOUT_S: Final = 120.0  # the largest takes 2.3 Mbit/s
BODY_INTERVAL_S: Final = 10.0  # in each of which so many bytes of a body must come
BODY_INTERVAL_BYTES: Final = 32 << 10
SPARE_DESCRIPTORS: Final = 128  # for --health-port, children and files, whatever connects to the API


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request has too large (431) or too slow a head, too slow a body (408), more than
    MAX_HEAD_BYTES of trailers and chunk extensions, or not one Host (400).

    An `Upgrade` is ignored, as HTTP allows: the request is answered as if it had none. (httptools takes what follows
    such a head for another protocol, so that its body would be lost, or read as the next request.) An answer without a
    length to an HTTP/1.0 request ends with the connection instead of coming in chunks."""

    def __init__(self, *args: Any, idle: IdleConnections | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle = idle
        self._had_request = False
        self._spare_bytes = 0  # of the head that is arriving, or since the last piece of the body
        self._head_timer: asyncio.TimerHandle | None = None  # set while one is awaited or arriving
        self._body_timer: asyncio.TimerHandle | None = None  # set while one is arriving
        self._body_due = 0.0  # when it must have arrived, in the loop's time
        self._body_bytes = 0  # that came in this interval
        self._is_refused = False  # nothing that follows is read
        self._is_known = False  # the head that is being parsed has been before

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS
        if len(self.connections) > most and not self._make_room():
            transport.abort()
            return
        self._await_head()
        self._await_request()

    def _await_request(self) -> None:
        if self._idle is not None:
            self._idle.add(self._address, self, is_kept_alive=self._had_request)

    def _awaits_no_request(self) -> None:
        if self._idle is not None:
            self._idle.remove(self._address, self)

    @property
    def _address(self) -> str | None:
        return None if self.client is None else self.client[0]

    def close_idle(self) -> None:
        """Too many connections wait for a request. From here on it counts no more."""
        self.connections.discard(self)
        if self._had_request:
            self.transport.close()
        else:
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._awaits_no_request()
        self._head_arrived()
        self._body_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._spare_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._is_refused or self._spare_bytes <= MAX_HEAD_BYTES:
            return
        if self._head_timer is not None:
            self._refuse_head()
        elif self._body_timer is not None:
            self.transport.close()

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._is_refused and self.parser.get_method() != b"CONNECT":
                self._parse_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._is_refused:
                self._is_refused = True
                self.send_400_response("Invalid HTTP request received.")

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Lets a new parser read the head again, without its Upgrade, and then `rest`."""
        head = [b"%s %s HTTP/1.1\r\n" % (self.parser.get_method(), self.url)]
        head += [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_known = True
        self._parse(b"".join([*head, b"\r\n"]))
        self._is_known = False
        if rest and not self._is_refused:
            self._parse(rest)

    def on_message_begin(self) -> None:
        if not self._is_known:
            super().on_message_begin()
            self._await_head()
            if self._idle is not None:
                self._idle.begin_request(self)

    def on_url(self, url: bytes) -> None:
        if not self._is_known:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_known:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_known or self._is_refused:
            return
        self._head_arrived()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse_head()
            return
        version = self.parser.get_http_version()
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            self._refuse(ApiError(HTTPStatus.BAD_REQUEST, f"there must be one Host header, not {hosts}"))
            return
        self._had_request = True
        self._awaits_no_request()
        self._body_due = self.loop.time() + BODY_TIMEOUT_S
        self._await_body()
        app, limit = self.app, self.limit_concurrency
        while self._has_too_many_connections() and self._make_room():
            pass
        if self._is_full():
            self.app, self.limit_concurrency = _refuse_connection, None  # uvicorn's own answer is plain text
        super().on_headers_complete()
        self.app, self.limit_concurrency = app, limit
        if version == "1.0":
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[assignment, method-assign]

    def _is_full(self) -> bool:
        """By uvicorn's own rule."""
        limit = self.limit_concurrency
        return self._has_too_many_connections() or (limit is not None and len(self.tasks) >= limit)

    def _has_too_many_connections(self) -> bool:
        return self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency

    def _make_room(self) -> bool:
        """Closes a connection that is kept alive without a request, if there is one."""
        return self._idle is not None and self._idle.close_kept_alive()

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        self._spare_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        is_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._is_refused or is_upgrade:
            return
        self._body_arrived()
        super().on_message_complete()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._spare_bytes = 0
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _body_arrived(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _await_body(self) -> None:
        self._body_bytes = 0
        left = self._body_due - self.loop.time()
        self._body_timer = self.loop.call_later(min(BODY_INTERVAL_S, left), self._look_at_body)

    def _look_at_body(self) -> None:
        """At each interval's end."""
        if self.loop.time() >= self._body_due:
            self._body_is_late(f"did not arrive within {BODY_TIMEOUT_S:g} s")
        elif self._body_bytes < BODY_INTERVAL_BYTES and not self.flow.read_paused:
            self._body_is_late(
                f"came too slowly: {BODY_INTERVAL_S:g} s must bring {BODY_INTERVAL_BYTES >> 10} KiB"
            )
        else:
            self._await_body()

    def _body_is_late(self, how: str) -> None:
        if self.cycle is not None and self.cycle.response_started:
            self.transport.close()
        else:
            self._refuse(ApiError(HTTPStatus.REQUEST_TIMEOUT, f"the request's body {how}"))

    def _refuse_head(self) -> None:
        message = f"the request's headers must have at most {MAX_HEAD_BYTES} bytes together"
        self._refuse(ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message))

    def _refuse(self, error: ApiError) -> None:
        self._is_refused = True
        body = orjson.dumps(error.body())
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _unchunked(cycle: RequestResponseCycle) -> Callable[[ASGISendEvent], Coroutine[Any, Any, None]]:
    """Returns the cycle's `send` for a client that knows no chunks."""
    plain = cycle.send
    is_endless = False

    async def send(message: ASGISendEvent) -> None:
        nonlocal is_endless
        if message["type"] == "http.response.start":
            is_endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", []))
            if is_endless:
                cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and is_endless:
            cycle.expected_content_length = len(message.get("body", b""))
        await plain(message)

    return send


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application for the connections beyond the limit."""
    error = ApiError(
        503, "the server has as many connections as it takes; try again later", code="overloaded"
    )
    headers = {"connection": "close", **error.headers()}
    await JsonResponse(error.body(), status_code=error.status, headers=headers)(scope, receive, send)
