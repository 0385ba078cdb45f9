"""uvicorn's HTTP/1.1 connection, with bounds on a request's head, on its body's framing, and on the time of both.

uvicorn itself accepts headers and trailers of any size, and waits for ever for a head or body that does not end."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final

import orjson
from starlette.types import Receive, Scope, Send
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.idle_connections import IdleConnections
from moeserve.httpserver.transport.sliced_connection import SlicedHttpProtocol
from moeserve.httpserver.transport.sse import JsonResponse
from moeserve.messages.refusal import Refusal

# The most bytes of the request line and headers. Trailers and chunk extensions have the same bound.
MAX_HEAD_BYTES: Final = 64 << 10
MAX_TARGET_BYTES: Final = 8 << 10
# The most header lines, and the most trailers. They are few because each look-up of a header walks through all of them.
MAX_FIELDS: Final = 128
MAX_FRAMING_BYTES: Final = 1 << 20  # the most bytes of a chunked body's framing
HEAD_TIMEOUT_S: Final = 10.0
BODY_TIMEOUT_S: Final = 120.0  # seconds for a whole body: the largest one then needs 2.3 Mbit/s
BODY_INTERVAL_S: Final = 10.0  # seconds: in each interval a minimum number of a body's bytes must come
BODY_INTERVAL_BYTES: Final = 32 << 10
# File descriptors kept back from API clients, for --health-port, child processes and files.
SPARE_DESCRIPTORS: Final = 128


class BoundedHttpProtocol(SlicedHttpProtocol):
    """Closes a connection whose request has: a head that is too large (431, 414) or too slow; a body that is too slow
    (408); more than MAX_HEAD_BYTES of trailers and chunk extensions between two pieces of a body, or MAX_FRAMING_BYTES
    of them in all (413); no Host header or several (400); a transfer coding other than chunked (501).

    An answer of unknown length to an HTTP/1.0 request is not chunked; the connection's end marks its end."""

    def __init__(
        self,
        *args: Any,
        idle: IdleConnections | None = None,
        count_refusal: Callable[[Refusal], None] = lambda reason: None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._idle = idle
        # Called for requests that this class refuses, before any middleware.
        self._count_refusal = count_refusal
        self._had_request = False
        # Bytes of the arriving head, or bytes of framing since the last piece of the body.
        self._spare_bytes = 0
        self._framing_bytes = 0  # bytes of the arriving body's framing
        self._fields = 0  # header lines of the head that is arriving, or trailers
        self._head_timer: asyncio.TimerHandle | None = None  # set while a head is awaited or arriving
        self._body_timer: asyncio.TimerHandle | None = None  # set while a body is arriving
        self._body_due = 0.0  # when the arriving body must be complete, in the loop's time
        self._body_bytes = 0  # bytes of the body in this interval

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS
        if len(self.connections) > most and not self._make_room():
            self._count_refusal(Refusal.CONNECTIONS)
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
        """Closes the connection, because too many connections wait for a request. The connection no longer counts as
        waiting."""
        self.connections.discard(self)
        if self._had_request:
            self.transport.close()
        else:
            self._count_refusal(Refusal.CONNECTIONS)
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._await_request()

    def linger(self) -> None:
        self._head_arrived()
        self._body_arrived()
        super().linger()
        self._await_request()  # from now on it counts as idle and may be closed to make room

    def connection_lost(self, exc: Exception | None) -> None:
        self._awaits_no_request()
        self._head_arrived()
        self._body_arrived()
        super().connection_lost(exc)

    # ------------------------------------------------------------ sizes

    def blank_lines_came(self, size: int) -> None:
        self._spare_bytes += size
        self._bound_spare_bytes()

    def _parse(self, data: bytes) -> None:
        self._spare_bytes += len(data)
        if self._body_timer is not None:
            self._framing_bytes += len(data)  # `on_body` subtracts the body's own bytes
        super()._parse(data)
        if not self._is_refused:
            self._bound_spare_bytes()

    def _bound_spare_bytes(self) -> None:
        if self._body_timer is None:
            if self._spare_bytes > MAX_HEAD_BYTES:
                self._refuse_head()
        elif self._spare_bytes > MAX_HEAD_BYTES or self._framing_bytes > MAX_FRAMING_BYTES:
            most = f"{MAX_HEAD_BYTES >> 10} KiB of them between two pieces, and {MAX_FRAMING_BYTES >> 20} MiB"
            self._refuse_body(413, f"has too many chunk heads, extensions or trailers: at most {most} in all")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._is_known:
            self._fields = 0
            self._await_head()
            if self._idle is not None:
                self._idle.begin_request(self)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_TARGET_BYTES and not self._is_refused:
            message = f"the request's path and query must have at most {MAX_TARGET_BYTES} bytes"
            self._refuse(ApiError(HTTPStatus.REQUEST_URI_TOO_LONG, message))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_known or self._is_refused:
            return
        self._fields += 1
        if self._fields > MAX_FIELDS:
            self._refuse_head()
        elif self._body_timer is None:  # not the trailers of a body, which no handler reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_known or self._is_refused:
            return
        self._head_arrived()
        self._fields = 0
        if (error := self._fault_of_head()) is not None:
            self._refuse(error)
            return
        self._had_request = True
        self.head_came()

    def begin_request(self) -> None:
        self._awaits_no_request()
        self._framing_bytes = 0
        self._body_due = self.loop.time() + BODY_TIMEOUT_S
        self._await_body()
        app, limit = self.app, self.limit_concurrency
        while self._has_too_many_connections() and self._make_room():
            pass
        if self._is_full():
            self._count_refusal(Refusal.CONNECTIONS)
            self.app, self.limit_concurrency = _refuse_connection, None  # uvicorn's own answer is plain text
        super().begin_request()
        self.app, self.limit_concurrency = app, limit
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[assignment, method-assign]

    def _fault_of_head(self) -> ApiError | None:
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            return ApiError(HTTPStatus.BAD_REQUEST, f"there must be one Host header, not {hosts}")
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            message = "the only transfer-encoding that is understood is chunked; encode the body with content-encoding"
            return ApiError(HTTPStatus.NOT_IMPLEMENTED, message)
        return None

    def _is_full(self) -> bool:
        """Returns whether the limit on connections is reached, by uvicorn's own rule."""
        limit = self.limit_concurrency
        return self._has_too_many_connections() or (limit is not None and len(self.tasks) >= limit)

    def _has_too_many_connections(self) -> bool:
        return self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency

    def _make_room(self) -> bool:
        """Closes one connection that is kept alive without a request, if any is."""
        return self._idle is not None and self._idle.close_kept_alive()

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        self._spare_bytes = 0
        self._framing_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        is_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._is_refused or is_upgrade:
            return
        self._spare_bytes = 0
        super().on_message_complete()

    def _end_of_request(self) -> None:
        self._body_arrived()
        super()._end_of_request()

    # ------------------------------------------------------------ times

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._held:  # the head has arrived and waits for its turn
            self._await_head()
            return
        if self._spare_bytes:  # a part of the head has arrived
            self._count_refusal(Refusal.TIMEOUT)
        self.transport.close()

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
        """Closes the connection if too few of the body's bytes came in the last interval. Called at each interval's
        end."""
        if self.loop.time() >= self._body_due:
            self._body_is_late(f"did not arrive within {BODY_TIMEOUT_S:g} s")
        elif self._body_bytes < BODY_INTERVAL_BYTES and not (self.flow.read_paused or self._held):
            self._body_is_late(
                f"came too slowly: {BODY_INTERVAL_S:g} s must bring {BODY_INTERVAL_BYTES >> 10} KiB"
            )
        else:
            self._await_body()

    def _body_is_late(self, how: str) -> None:
        self._refuse_body(HTTPStatus.REQUEST_TIMEOUT, how)

    # ------------------------------------------------------------ refusals

    def refuse_unreadable(self) -> None:
        self._refuse(ApiError(HTTPStatus.BAD_REQUEST, "this is not a valid HTTP/1.1 request"))

    def _refuse_head(self) -> None:
        message = (
            f"the request's headers must have at most {MAX_HEAD_BYTES} bytes together, in {MAX_FIELDS} lines"
        )
        self._refuse(ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message))

    def _refuse_body(self, status: int, why: str) -> None:
        self._refuse(ApiError(status, f"the request's body {why}"))

    def _refuse(self, error: ApiError) -> None:
        """Answers with the error; closes the connection if the answer to the request has begun."""
        if self._is_arriving and self._body_timer is not None and self.cycle.response_started:
            self.transport.close()
            return
        if error.refusal is not None:
            self._count_refusal(error.refusal)
        body = orjson.dumps(error.body())
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.linger()


def _unchunked(cycle: RequestResponseCycle) -> Callable[[ASGISendEvent], Coroutine[Any, Any, None]]:
    """Returns a `send` for the cycle of an HTTP/1.0 client, which does not understand chunks."""
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
