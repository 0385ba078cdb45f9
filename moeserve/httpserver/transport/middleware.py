"""Middleware before every route: the request's id, the API key, a bound on the body.

Plain ASGI: Starlette's BaseHTTPMiddleware would hide the client's disconnect from the routes.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.keys import ApiKeys, fault_of
from moeserve.httpserver.transport.refuse import refuse
from moeserve.httpserver.transport.request_state import state_of
from moeserve.messages.refusal import Refusal
from moeserve.processes import logs

# The limit on a body grows with the context: for each token, four times the average size of the longest tokens, escaped
# in JSON. It is never more than 32 MiB, because parsing 32 MiB of the worst JSON stops all streams for seconds.
BODY_BYTES_PER_TOKEN: Final = 64
MIN_BODY_LIMIT: Final = 4 << 20
MAX_BODY_BYTES: Final = 32 << 20  # the limit while the context is not known yet
# The most bytes of all bodies together. A hostile body takes twenty times its bytes when it is parsed.
MAX_BODIES_BYTES: Final = 256 << 20
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """Gives every request an id: the client's X-Request-Id if it is valid, else a new id. A header of the answer has
    the id."""

    def __init__(self, app: ASGIApp, apis: ApiTable) -> None:
        self.app = app
        self._apis = apis

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = state_of(scope)
        state.request_id = request_id
        logs.request_id.set(request_id)  # for log lines of this request's task

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if (name := self._apis.request_id_header(scope["path"])) is not None:
                    headers[name] = request_id
                for name, text in state.notes.items():
                    headers[name] = text
            await send(message)

        await self.app(scope, receive, send_with_id)


class HeadAsGet:
    """Routes HEAD requests as GET; the connection omits the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}  # the connection itself still sees HEAD
        await self.app(as_get, receive, send)
        scope["route"] = as_get.get("route")


class ApiKey:
    """Answers 401 to a request without a known key, before its body is read."""

    def __init__(self, app: ASGIApp, apis: ApiTable, keys: ApiKeys) -> None:
        self.app = app
        self._apis = apis
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._apis.open_paths:
            await self.app(scope, receive, send)
            return
        key = self._keys.key_in(scope["headers"])
        if key is not None:
            state = state_of(scope)
            state.tenant, state.key_owner = self._keys.name_of(key) or "", self._keys.owner_of(key)
            await self.app(scope, receive, send)
            return
        fault = fault_of(scope["headers"])
        message = f"a valid API key is required, and {fault}: send it as Authorization: Bearer <key>, or as x-api-key"
        await refuse(scope, send, self._apis, ApiError(401, message, code="invalid_api_key"))


def body_limit(context: int | None) -> int:
    """Returns the most bytes of a body whose prompt and answer have at most `context` tokens together."""
    if context is None:
        return MAX_BODY_BYTES
    return min(max(context * BODY_BYTES_PER_TOKEN, MIN_BODY_LIMIT), MAX_BODY_BYTES)


class BodyLimit:
    """Bounds bodies. A body over `body_limit` gets a 413: at once if its length is announced, else when it reaches the
    limit. An upload, which is written to disk while it arrives, has a limit of its own. A body gets a 503 if the bodies
    of all running requests would exceed MAX_BODIES_BYTES, or if its API key's bodies would exceed the key's share.
    While n keys have bodies, a key's share is 1 / (n + 1) of MAX_BODIES_BYTES, so that there is room for one more key.
    A key's only body never exceeds its share."""

    def __init__(self, app: ASGIApp, apis: ApiTable, context: Callable[[], int | None]) -> None:
        """`context` returns the longest prompt plus answer in tokens, or None while it is not known."""
        self.app = app
        self._apis = apis
        self._context = context
        # Bytes of the bodies of open requests, by the key's name.
        self._held: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        upload = self._apis.uploads.get(scope["path"])
        most = body_limit(self._context()) if upload is None else upload
        too_large = ApiError(413, f"the body must have at most {most} bytes", code="body_too_large")
        if announced.isdecimal() and int(announced) > most:
            await refuse(scope, send, self._apis, too_large)
            return
        received = held = 0  # bytes
        key = state_of(scope).tenant

        async def receive_bounded() -> Message:
            nonlocal received, held
            message = await receive()
            size = len(message.get("body", b""))
            received += size
            if received > most:
                raise _BodyRefused(too_large)
            if upload is not None:
                return message
            held += size
            self._held[key] += size
            if self._held.total() > MAX_BODIES_BYTES:
                raise _BodyRefused(_no_room("the bodies of the requests under way take", Refusal.MEMORY))
            if self._held[key] > max(self._share(key), received):
                raise _BodyRefused(_no_room("the bodies of this API key's requests take", Refusal.QUOTA))
            return message

        try:
            await self.app(scope, receive_bounded, send)
        except _BodyRefused as refused:
            await refuse(scope, send, self._apis, refused.error)
        finally:
            self._held[key] -= held
            if not self._held[key]:
                del self._held[key]

    def _share(self, key: str) -> int:
        return MAX_BODIES_BYTES // (len(self._held) + 1) if key else MAX_BODIES_BYTES


def _no_room(who: str, refusal: Refusal) -> ApiError:
    return ApiError(
        503,
        f"{who} all the memory that request bodies may take; try again later",
        code="overloaded",
        refusal=refusal,
    )


class _BodyRefused(Exception):
    """Raised in a route while the route reads its body, and thus before the answer begins."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error
