"""Access: one log line, one count and, with tracing, one span for each HTTP request.

This is plain ASGI middleware. Only the middleware that sets the request's id is outside it.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Set
from typing import Final, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeserve.httpserver.observability.request_record import RequestRecord, record_of
from moeserve.httpserver.transport.errors import CLIENT_CLOSED_REQUEST
from moeserve.httpserver.transport.refuse import refusal_of
from moeserve.messages.refusal import Refusal
from moeserve.processes.tracing import Span, Tracer

# Operators filter by this name: docs/reference/logs-and-traces.md.
log = logging.getLogger("moeserve.httpserver.access")

MAX_PATH_CHARS: Final = 500  # in a log line; a client may send 64 kB
_METHODS: Final = frozenset({"GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"})


class AnswerCounts(Protocol):
    """The counters of answers and refusals."""

    @abstractmethod
    def answered(self, method: str, handler: str, status: int) -> None: ...

    @abstractmethod
    def refused(self, reason: Refusal) -> None: ...


class Access:
    def __init__(
        self, app: ASGIApp, metrics: AnswerCounts, tracer: Tracer | None, quiet_paths: Set[str] = frozenset()
    ) -> None:
        """quiet_paths: paths that are polled every few seconds; they are logged at debug level and not traced."""
        self.app = app
        self._quiet_paths = quiet_paths
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = record_of(scope)
        span = self._begin(scope, record)
        status = CLIENT_CLOSED_REQUEST  # replaced by the answer's status

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noting)
        except Exception as error:
            status, record.error = 500, f"{type(error).__name__}: {error}"
            raise  # the framework answers, bypassing this middleware
        finally:
            self._ended(scope, record, status, span)

    def _begin(self, scope: Scope, record: RequestRecord) -> Span | None:
        if self._tracer is None or scope["path"] in self._quiet_paths:
            return None
        headers = Headers(scope=scope)
        span = self._tracer.begin(
            _method(scope),
            headers.get("traceparent", ""),
            record.arrival,
            {"http.request.method": _method(scope), "url.path": scope["path"], "url.scheme": scope["scheme"]},
            is_server=True,
            tracestate=headers.get("tracestate", ""),
        )
        record.trace = span.traceparent
        return span

    def _ended(self, scope: Scope, record: RequestRecord, status: int, span: Span | None) -> None:
        now = time.monotonic()
        method, route = _method(scope), getattr(scope.get("route"), "path", "")
        self._metrics.answered(method, route or "other", status)
        refusal = refusal_of(scope)
        if refusal is not None:
            self._metrics.refused(refusal)
        level = logging.DEBUG if scope["path"] in self._quiet_paths else logging.INFO
        if log.isEnabledFor(level):
            seconds, said = now - record.arrival, record.text()
            path = scope["path"][:MAX_PATH_CHARS]
            fields = {
                "method": method,
                "path": path,
                "status": status,
                "duration_ms": round(seconds * 1e3, 1),
                **({} if refusal is None else {"refusal": str(refusal)}),
                **record.fields(),
            }
            text = "%s %s %d in %.3f s%s"
            args = (method, path, status, seconds, f": {said}" if said else "")
            log.log(level, text, *args, extra={"fields": fields})
        if span is not None:
            span.rename(f"{method} {route}" if route else method)
            span.set({"http.response.status_code": status} | ({"http.route": route} if route else {}))
            if status >= 500:
                span.fail(record.error)
            span.end(now)


def _method(scope: Scope) -> str:
    """Returns the method if it is a known one, else "_OTHER": clients must not be able to invent label values."""
    return scope["method"] if scope["method"] in _METHODS else "_OTHER"
