"""The defence against web pages of other sites (CSRF): refuses bodies that a page can send without a CORS preflight.

Before a page of another origin may send `application/json`, the browser makes a CORS preflight, which only the origins
of --allowed-origin pass. For a form's types, `text/plain` or no type there is no preflight. Other clients send these
types too, such as curl's `-d` and LiteLLM; but they send neither `Origin` nor `Sec-Fetch-Site`, which browsers add and
pages cannot change.
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
    """Answers 403, before the body is read, to a POST that is not JSON if it comes from a web page whose origin is
    neither the server's own nor in `allowed` ("*": any origin)."""

    def __init__(self, app: ASGIApp, apis: ApiTable, allowed: Iterable[str]) -> None:
        self.app = app
        self._apis = apis
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A GET has no effect, and other methods need a preflight.
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
            case None | "none":  # None: an old browser or another client; "none": the user typed the address
                # The scheme is not compared: behind a proxy that terminates TLS it differs.
                return origin is not None and origin.partition("://")[2] != headers.get("host")
        return True
