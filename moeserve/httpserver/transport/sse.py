"""JSON answers and server-sent events, both of which end when their client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

import orjson
from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.refuse import note_refusal, request_id_of

T = TypeVar("T")
Answered = Mapping[str, Any] | Sequence[Mapping[str, Any]]  # as JSON

SEND_TIMEOUT_S: Final = 120.0  # a client that reads nothing for this long counts as disconnected
DONE: Final = b"data: [DONE]\n\n"
COMMENTS_AFTER_S: Final = 0.5  # by then a request that is going to be refused has been refused
BLANKS_AFTER_S: Final = 30.0  # half of nginx's default timeout
BEAT_S: Final = 10.0
BLANK: Final = b" "  # between two lines of JSON
BREAKS_OFF: Final = (
    "moeserve.breaks_off"  # of an ASGI message: the connection is closed without the body's end
)


class ClientGone(Exception):
    """The client closed its connection, or stopped reading it."""


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


async def answer(request: Request, work: Coroutine[Any, Any, Answered]) -> Response:
    """Answers with the JSON of the result of `work`. A disconnect cancels `work`."""

    def error_body(error: ApiError) -> Mapping[str, Any]:
        body: Mapping[str, Any] = request.app.apis.error_body(request.url.path, error, request_id_of(request))
        return body

    return _Awaited(work, error_body)


class _Awaited(Response):
    """JSON that may take longer than proxies and clients wait for the first byte of an answer (nginx 60 s, Node 300 s).

    An answer within BLANKS_AFTER_S has its own status. After that time, status 200 is sent, and then blanks, which JSON
    allows, until the JSON comes. A failure can then no longer set the status: the body is the error's JSON. If it is a
    failure of the server, the body breaks off after that JSON (`breaks_off`)."""

    media_type = JsonResponse.media_type

    def __init__(
        self,
        work: Coroutine[Any, Any, Answered],
        error_body: Callable[[ApiError], Mapping[str, Any]],
    ) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})  # else nginx buffers the blanks
        del self.headers["content-length"]
        self.work = work
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = _Parts(send, self.headers.raw, BLANKS_AFTER_S, b"\n")
        async with parts.beating():
            try:
                content = orjson.dumps(await self.work)
            except ApiError as error:
                if not parts.have_begun:
                    raise
                note_refusal(scope, error)
                await parts.end(orjson.dumps(self._error_body(error)), breaks_off=breaks_off(error.status))
                return
            if not parts.have_begun:
                self.headers["content-length"] = str(len(content))
            await parts.end(content)


async def json_of(response: Response) -> bytes:
    """Returns the JSON of a response that is not sent to a client: one from `answer`, or a complete one. Raises
    ApiError."""
    return orjson.dumps(await response.work) if isinstance(response, _Awaited) else bytes(response.body)


class EventStream(Response):
    """Sends each chunk as one event; with `named`, the event's name is the chunk's `type`.

    The status line is sent with the first chunk, or after COMMENTS_AFTER_S if the first chunk has not come. Refusals
    come sooner; a request that takes longer is queued or in prefill. A failure before the status line is a plain HTTP
    error, a later one an event of `error_body`. After BEAT_S without an event a comment is sent, because proxies and
    clients close silent connections. `chunks` is closed in every case.
    """

    media_type = "text/event-stream"
    comment = b": at work\n\n"

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
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        parts = _Parts(send, self.raw_headers, COMMENTS_AFTER_S, self.comment)
        async with aclosing(self._chunks) as chunks, parts.beating():
            try:
                async for chunk in chunks:
                    await parts.send(self._event(chunk))
            except ApiError as error:
                if not parts.have_begun:
                    raise
                note_refusal(scope, error)
                await parts.send(self._event(self._error_body(error)))
            await parts.end(self._end)


class JsonLines(EventStream):
    """Sends each chunk as a line of JSON. Clients parse each line and do not know comments. So between two chunks a
    blank is sent instead of a comment; JSON allows it before the next line's object."""

    media_type = "application/x-ndjson"
    comment = BLANK

    def __init__(
        self,
        chunks: AsyncGenerator[Mapping[str, Any], None],
        *,
        error_body: Callable[[ApiError], Mapping[str, Any]],
    ) -> None:
        super().__init__(chunks, end=b"", error_body=error_body)
        self._event = _line


class _Parts:
    """Sends the parts of an answer, with the answer's head before the first part, and `beat` if no part comes for a
    while."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], patience: float, beat: bytes) -> None:
        """patience: seconds without a part until the first `beat`; the next ones follow every BEAT_S."""
        self._send = send
        self._headers = headers
        self._patience = patience
        self._beat = beat
        self._sent_at = time.monotonic()
        self._sending = asyncio.Lock()  # a task of its own sends the beats
        self.have_begun = False

    async def send(self, part: bytes) -> None:
        await self._write(part, more=True)

    async def end(self, part: bytes, *, breaks_off: bool = False) -> None:
        """Sends the last part. breaks_off: the body gets no end."""
        await self._write(part, more=False, breaks_off=breaks_off)

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        beating = asyncio.create_task(self._beat_on())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.wait({beating})

    async def _beat_on(self) -> None:
        with contextlib.suppress(ClientGone):  # the next part will notice the disconnect too
            while True:
                due = self._sent_at + (BEAT_S if self.have_begun else self._patience)
                if (wait := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                else:
                    await self._write(self._beat, more=True)

    async def _write(self, part: bytes, more: bool, breaks_off: bool = False) -> None:
        async with self._sending:
            if not self.have_begun:
                self.have_begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send_part(self._send, part, more, breaks_off=breaks_off)
            self._sent_at = time.monotonic()


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _line(chunk: Mapping[str, Any]) -> bytes:
    return orjson.dumps(chunk) + b"\n"


def _named_event(chunk: Mapping[str, Any]) -> bytes:
    return b"event: " + str(chunk["type"]).encode() + b"\n" + _event(chunk)


def breaks_off(status: int) -> bool:
    """Returns whether JSON that has begun with status 200 and fails with `status` is sent without the body's end.

    Client libraries raise an error for such a body and repeat the request, as they do for these statuses. They would
    take a complete body with status 200 for an answer, and fail when they look for its text. A request that is itself
    at fault must not be repeated, so its error has a complete body."""
    return status >= 500


async def send_part(send: Send, part: bytes, more: bool, *, breaks_off: bool = False) -> None:
    """Sends a part of an answer. Waits while the client's socket is full, which delays only this request. breaks_off:
    it is the last part of a body that gets no end (`sliced_connection.py`)."""
    message: Message = {"type": "http.response.body", "body": part, "more_body": more}
    if breaks_off:
        message[BREAKS_OFF] = True
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send(message)
    except TimeoutError:
        raise ClientGone from None


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
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
