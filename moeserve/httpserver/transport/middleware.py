"""What happens to every request before its route: an id, the API key, a bound on the body.

Plain ASGI: Starlette's BaseHTTPMiddleware would hide the client's disconnect from the routes.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable
from typing import Final

import orjson
from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeserve import logs
from moeserve.httpserver.transport.errors import MESSAGES_PATH, ApiError, error_body
from moeserve.httpserver.transport.keys import ApiKeys, key_name, key_owner
from moeserve.httpserver.web import pages

# A body's, by the context: four times what the longest tokens in JSON's escapes take, on average. Parsing 32 MiB of the
# worst stops all streams for seconds.
BODY_BYTES_PER_TOKEN: Final = 64
MIN_BODY_LIMIT: Final = 4 << 20
MAX_BODY_BYTES: Final = 32 << 20  # also while the context is not known
MAX_BODIES_BYTES: Final = (
    256 << 20
)  # of all requests together; parsed, a hostile body takes twenty times its bytes
LINGER_S: Final = 5.0  # for a refused body to arrive, unread: closing earlier could lose our answer
OPEN_PATHS: Final = pages.PATHS | {"/health", "/metrics"}  # no API key: for browsers, probes and scrapers
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_STATE_KEY: Final = "request_id"


def request_id_of(request: Request) -> str:
    request_id: str = request.scope["state"][_STATE_KEY]
    return request_id


class RequestId:
    """The client's X-Request-Id where it sent a usable one, else one of ours; echoed in the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})[_STATE_KEY] = request_id
        logs.request_id.set(request_id)  # for the lines that this request's task writes

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if scope["path"].startswith(MESSAGES_PATH):
                    headers["request-id"] = request_id  # Anthropic's name for it
            await send(message)

        await self.app(scope, receive, send_with_id)


class ApiKey:
    """401 for a request without a bearer token that is one of the keys, before its body is read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        key = self._key(scope)
        if key is not None:
            key_name.set(self._keys.name_of(key) or "")  # of this request's task and those that it starts
            key_owner.set(self._keys.owner_of(key))
            await self.app(scope, receive, send)
            return
        message = "a valid API key is required: send it as Authorization: Bearer <key>, or as x-api-key"
        await refuse(scope, send, ApiError(401, message, code="invalid_api_key"))

    def _key(self, scope: Scope) -> bytes | None:
        """The one of the request's that we know."""
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [key.strip()] if scheme.lower() == "bearer" else []
        given.append(headers.get("x-api-key", ""))  # Anthropic's clients
        keys = [one.encode("latin-1") for one in given]  # what headers are decoded from
        return next((key for key in keys if self._keys.name_of(key) is not None), None)


def body_limit(context: int | None) -> int:
    """Bytes of a request's body, where prompt and answer have at most `context` tokens."""
    if context is None:
        return MAX_BODY_BYTES
    return min(max(context * BODY_BYTES_PER_TOKEN, MIN_BODY_LIMIT), MAX_BODY_BYTES)


class BodyLimit:
    """413 for a body over `body_limit`: at once where its length is announced, else when it gets there. 503 for one
    that does not fit beside those of the requests under way."""

    def __init__(self, app: ASGIApp, context: Callable[[], int | None]) -> None:
        """`context` tells the longest prompt and answer, in tokens, once it is known."""
        self.app = app
        self._context = context
        self._held = 0  # bytes of bodies whose requests have not ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        most = body_limit(self._context())
        too_large = ApiError(413, f"the body must have at most {most} bytes", code="body_too_large")
        if announced.isdecimal() and int(announced) > most:
            await refuse(scope, send, too_large, receive)
            return
        received = 0

        async def receive_bounded() -> Message:
            nonlocal received
            message = await receive()
            size = len(message.get("body", b""))
            received += size
            self._held += size
            if received > most:
                raise _BodyRefused(too_large)
            if self._held > MAX_BODIES_BYTES:
                cause = "the bodies of the requests under way take all the memory that there is for them"
                raise _BodyRefused(ApiError(503, cause, code="overloaded"))
            return message

        try:
            await self.app(scope, receive_bounded, send)
        except _BodyRefused as refused:
            await refuse(scope, send, refused.error, receive)
        finally:
            self._held -= received


class _BodyRefused(Exception):
    """Raised while a route reads its body, so before it has answered."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


async def refuse(scope: Scope, send: Send, error: ApiError, receive: Receive | None = None) -> None:
    """Answers with `error`. With `receive`, the rest of the body is let in and thrown away before the
    connection closes: unread bytes would make the kernel reset it, and the client lose the answer."""
    body = orjson.dumps(error_body(scope["path"], error, scope["state"][_STATE_KEY]))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error.headers(),
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": receive is not None})
    if receive is None:
        return
    try:
        async with asyncio.timeout(LINGER_S):
            while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                pass
    except TimeoutError:
        pass  # a slow sender has had its time
    await send({"type": "http.response.body", "body": b"", "more_body": False})
