"""A bound on each API key's open requests, so that no key takes all connections."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.refuse import refuse
from moeserve.httpserver.transport.request_state import state_of
from moeserve.messages.refusal import Refusal


class OpenRequests:
    """Answers 503 to a request whose key has too many open requests, before the body is read. Paths that need no key
    are not counted."""

    def __init__(self, app: ASGIApp, apis: ApiTable, most: int) -> None:
        self.app = app
        self._apis = apis
        self._most = most
        self._open: Counter[str] = Counter()  # by the key's name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (key := state_of(scope).tenant):
            await self.app(scope, receive, send)
            return
        if self._open[key] >= self._most:
            message = f"this API key has {self._most} open requests, as many as it may have; try again later"
            await refuse(
                scope, send, self._apis, ApiError(503, message, code="overloaded", refusal=Refusal.QUOTA)
            )
            return
        self._open[key] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
