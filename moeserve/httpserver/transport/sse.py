"""JSON answers and server-sent events, both of which end when their client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeVar

import orjson
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from moeserve.httpserver.transport.errors import CLIENT_CLOSED_REQUEST, ApiError

T = TypeVar("T")

SEND_TIMEOUT_S: Final = 120.0  # a client that reads nothing for this long counts as disconnected
DONE: Final = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection, or stopped reading it."""


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


async def answer(request: Request, work: Coroutine[Any, Any, Mapping[str, Any]]) -> Response:
    """Answers with the JSON of the result of `work`. A disconnect cancels `work`."""
    try:
        return JsonResponse(await _unless_gone(request.receive, work))
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


class EventStream(Response):
    """Sends each chunk as one event; with `named`, the event has the name of the chunk's type.

    The status line waits for the first chunk, so a failure before it is a plain HTTP error. A later failure is an event
    of `error_body`. `chunks` is closed in every case.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[Mapping[str, Any], None],
        end: bytes = DONE,
        *,
        named: bool = False,
        error_body: Callable[[ApiError], Mapping[str, Any]] = ApiError.body,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._end = end
        self._event = _named_event if named else _event
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(receive, self._send_all(send))
        except ClientGone:
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            event = self._event(await anext(chunks))
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send_part(send, event)
            try:
                async for chunk in chunks:
                    await _send_part(send, self._event(chunk))
            except ApiError as error:
                await _send_part(send, self._event(self._error_body(error)))
        await _send_part(send, self._end, more=False)


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _named_event(chunk: Mapping[str, Any]) -> bytes:
    return b"event: " + str(chunk["type"]).encode() + b"\n" + _event(chunk)


async def _send_part(send: Send, part: bytes, more: bool = True) -> None:
    """Waits while the client's socket is full; this back-pressure affects this request only."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": part, "more_body": more})
    except TimeoutError:
        raise ClientGone from None


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels `work`, waits for its end and raises
    ClientGone."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected. The body has been read, so no other message can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
