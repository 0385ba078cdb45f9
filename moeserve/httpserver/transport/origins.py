"""The defence against pages of other sites: a body that a browser sends without asking first must not be theirs.

A browser asks before a page of another origin may send `application/json` (the CORS preflight, which only the origins
of --allowed-origin pass), but not before a form's types, `text/plain` or no type at all. Clients that are no browsers
send these too, curl's `-d` and LiteLLM among them. They send neither `Origin` nor `Sec-Fetch-Site`, which browsers add
and no page can change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.errors import ApiError, shown
from moeserve.httpserver.transport.refuse import refuse

PREFLIGHTED: Final = "application/json"


class ForeignPages:
    """Answers 403 to a POST of another content type than JSON by a page of an origin that is neither the server's own
    nor one of `allowed` ("*": all are), before its body is read."""

    def __init__(self, app: ASGIApp, apis: ApiTable, allowed: Iterable[str]) -> None:
        self.app = app
        self._apis = apis
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A GET has no effect, and browsers ask before any other method.
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type == PREFLIGHTED or not self._is_foreign(headers):
            await self.app(scope, receive, send)
            return
        origin = shown(headers["origin"]) if "origin" in headers else "another site"
        message = (
            f"a page of {origin} must send its body as {PREFLIGHTED}, and this server must be started with "
            "--allowed-origin and that origin"
        )
        error = ApiError(403, message, param="content-type", code="foreign_origin")
        await refuse(scope, send, self._apis, error)

    def _is_foreign(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin in self._allowed or "*" in self._allowed:
            return False
        match headers.get("sec-fetch-site"):
            case "same-origin":
                return False
            case None | "none":  # an old browser or no browser; an address that the user typed
                # The scheme is not compared: behind a proxy that ends TLS, ours is another.
                return origin is not None and origin.partition("://")[2] != headers.get("host")
        return True
