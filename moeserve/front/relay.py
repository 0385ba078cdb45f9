"""Passes a request to its model's server, and passes the answer back piece by piece.

The front has checked the request (`app.py`) before anything here runs. When a client disconnects, its request ends at
the model's server too.

If that server is lost before the answer's first output, the request waits for the model's next server and is sent to
that one, as if it had just come: the client has seen nothing of the first attempt, so the second may draw another seed.
If the server is lost in the middle of an answer, a stream ends with an error in its API's shape. For any other answer
the connection is cut, so that no client takes the part for the whole answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Iterable
from functools import partial
from typing import Final

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send
from yarl import URL

from moeserve.front.early_answer import EarlyAnswer, EarlyEvents, EarlyJson, EarlyLines, error_event
from moeserve.front.instance import ServerInstance
from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import Instance, PooledModel
from moeserve.front.requested_model import OLLAMA, Asked
from moeserve.httpserver.responses.routes import BACKGROUND_HEADER, RESPONSES
from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.refuse import note_refusal
from moeserve.httpserver.transport.request_state import state_of
from moeserve.httpserver.transport.sse import ClientGone, send_part, unless_gone

# A request is sent to this many servers of its model at most. One that kills them all would never end.
MOST_SENDINGS: Final = 3
# A header of answers: how long the request waited for its model.
LOAD_SECONDS: Final = b"x-moeserve-load-seconds"
FIRST_LOOK_S: Final = 0.5  # before the first look at a response that is made in the background
MAX_LOOK_S: Final = 8.0  # between two looks at it
# Headers that belong to one connection, or that the front sets itself.
_NOT_SENT_ON: Final = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"expect"),
        *(b"transfer-encoding", b"content-length", b"content-encoding", b"host", b"x-request-id"),
        *(b"origin", b"referer", b"access-control-request-method", b"access-control-request-headers"),
    )
)
_NOT_SENT_BACK: Final = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"))
_BROWSERS: Final = b"sec-fetch-"
# What keeps a connection open before the answer's first output: comments of a stream, blanks of JSON.
_FILLER: Final = re.compile(rb"(?:[ \n]|:[^\n]*\n\n)*")

log = logging.getLogger(__name__)


class _Unanswered(Exception):
    """The server ended before the client had any output of it."""


class Relay:
    def __init__(self, pool: ModelPool, apis: ApiTable) -> None:
        self._pool = pool
        self._apis = apis

    async def answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        model: PooledModel,
        asked: Asked,
        body: bytes,
        *,
        is_repeatable: bool = True,
    ) -> None:
        """Answers a request, after loading its model if needed. is_repeatable: the request may be sent again if its
        server is lost. Raises ApiError for a failure before the answer has begun."""
        exchange = _Exchange(self._pool, self._apis, scope, send, model, body)
        exchange.most_sendings = MOST_SENDINGS if is_repeatable else 1
        if asked.streams_events:
            exchange.early = EarlyEvents(send, lambda: model.progress_text)
        else:
            exchange.early = EarlyLines(send) if asked.streams_lines else EarlyJson(send)
        exchange.keep_alive = asked.keep_alive
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, exchange.run())

    async def answer_if_loaded(
        self, scope: Scope, receive: Receive, send: Send, model: PooledModel, body: bytes = b""
    ) -> None:
        """Answers a question about a model without loading the model. Raises ApiError."""
        exchange = _Exchange(self._pool, self._apis, scope, send, model, body)
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, exchange.run_if_loaded())

    async def has(self, scope: Scope, model: PooledModel) -> bool:
        """Returns whether the model's server answers a GET of this path with a status other than 404."""
        try:
            async with self._pool.lease_loaded(model) as instance:
                assert isinstance(instance, ServerInstance)
                request = instance.session.request(
                    "GET", _url_of(scope), headers=_headers_on(scope), allow_redirects=False
                )
                async with request as answer:
                    return answer.status != 404
        except (ApiError, aiohttp.ClientError, OSError):
            return False


class _Exchange:
    """One request and its answer."""

    early: EarlyAnswer | None = None
    most_sendings = 1
    keep_alive: float | None = None  # of a request of Ollama's API; others leave it as it is

    def __init__(
        self, pool: ModelPool, apis: ApiTable, scope: Scope, send: Send, model: PooledModel, body: bytes
    ) -> None:
        self._pool = pool
        self._apis = apis
        self._scope = scope
        self._send = send
        self._model = model
        self._body = body
        self._came = time.monotonic()
        self._has_begun = False  # the answer's head has been passed back

    async def run(self) -> None:
        try:
            for sendings in range(1, self.most_sendings + 1):
                instance = await self._acquire()
                try:
                    assert isinstance(instance, ServerInstance)
                    if self._scope["path"].startswith(OLLAMA):
                        self._pool.keep(self._model, self.keep_alive)
                    await self._relay(instance)
                    return
                except _Unanswered as error:
                    if sendings == self.most_sendings:
                        raise self._lost() from error
                finally:
                    self._pool.release(self._model, instance)
                self._model.num_sent_again += 1
                await self._until_back(instance)
        except ApiError as error:
            if not self._have_begun:
                raise
            note_refusal(self._scope, error)
            assert self.early is not None
            await self.early.fail(error.status, self._error_body(error))

    @property
    def _have_begun(self) -> bool:
        return self._has_begun or (self.early is not None and self.early.have_begun)

    async def _acquire(self) -> Instance:
        acquiring = self._pool.acquire(self._model)
        if self.early is None:
            return await acquiring
        return await self.early.until(acquiring, partial(self._pool.release, self._model))

    async def _until_back(self, instance: Instance) -> None:
        waiting = self._pool.until_back(self._model, instance)
        await (waiting if self.early is None else self.early.until(waiting, lambda _: None))

    async def run_if_loaded(self) -> None:
        async with self._pool.lease_loaded(self._model) as instance:
            assert isinstance(instance, ServerInstance)
            try:
                await self._relay(instance)
            except _Unanswered:
                raise self._lost() from None

    async def _relay(self, instance: ServerInstance) -> None:
        """Raises _Unanswered."""
        if instance.session.closed:  # the server has ended since the lease began
            raise _Unanswered
        request = instance.session.request(
            self._scope["method"],
            _url_of(self._scope),
            data=self._body or None,
            headers=_headers_on(self._scope),
            allow_redirects=False,
        )
        waited = time.monotonic() - self._came
        try:
            answer = await request
        except (aiohttp.ClientError, OSError) as error:
            raise _Unanswered from error
        if answer.status == 503 and self.most_sendings > 1 and not await instance.is_ready():
            answer.close()  # a part of the server was replaced, and the server is not ready yet
            raise _Unanswered
        if (response_id := answer.headers.get(BACKGROUND_HEADER)) is not None:
            self._pool.hold(self._model, instance, self._until_background_ends(instance, response_id))
        async with answer:
            await self._pass_back(answer, waited)

    async def _until_background_ends(self, instance: ServerInstance, response_id: str) -> None:
        """Returns when a response that is made in the background has ended, or when its server has ended."""
        headers = [pair for pair in _headers_on(self._scope) if not pair[0].startswith("content-")]
        url = f"http://localhost{RESPONSES}/{response_id}"
        pause = FIRST_LOOK_S
        with contextlib.suppress(aiohttp.ClientError, OSError, orjson.JSONDecodeError):
            while True:
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_LOOK_S)
                async with instance.session.get(url, headers=headers) as answer:
                    found = orjson.loads(await answer.read())
                if answer.status != 200 or found["status"] not in ("queued", "in_progress"):
                    return

    async def _pass_back(self, answer: aiohttp.ClientResponse, waited: float) -> None:
        """Raises _Unanswered where the server is lost before the client has any output of it."""
        if self._have_begun and answer.status != 200:
            await self._pass_back_late(answer)
            return
        has_output = False
        try:
            async for piece in answer.content.iter_any():
                await self._begin(answer, waited)
                has_output = has_output or _FILLER.fullmatch(piece) is None
                await send_part(self._send, piece, True)
        except (aiohttp.ClientError, OSError) as error:
            if not has_output:
                raise _Unanswered from error
            await self._end_cut(answer.content_type, error)
            return
        await self._begin(answer, waited)
        await send_part(self._send, b"", False)

    async def _begin(self, answer: aiohttp.ClientResponse, waited: float) -> None:
        if not self._have_begun:
            self._has_begun = True
            if self.early is not None:
                self.early.have_begun = True
            headers = [*_headers_back(answer.raw_headers), (LOAD_SECONDS, f"{waited:.3f}".encode())]
            await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _pass_back_late(self, answer: aiohttp.ClientResponse) -> None:
        """Passes on an error after the status 200 has been sent."""
        assert self.early is not None
        try:
            await self.early.fail(answer.status, orjson.loads(await answer.read()))
        except (aiohttp.ClientError, OSError) as error:
            raise _Unanswered from error
        except (orjson.JSONDecodeError, AttributeError):
            lost = self._lost()
            await self.early.fail(lost.status, self._error_body(lost))

    async def _end_cut(self, content_type: str, error: Exception) -> None:
        """Ends an answer whose server was lost in the middle of the answer."""
        log.warning("an answer of %s was cut: %s", self._model.name, error)
        body = self._error_body(self._lost())
        if content_type == "text/event-stream":
            await send_part(self._send, error_event(body), False)
        elif content_type == "application/x-ndjson":
            await send_part(self._send, orjson.dumps(body) + b"\n", False)
        else:
            await send_part(self._send, b"", False, breaks_off=True)

    def _lost(self) -> ApiError:
        message = f"the server of the model {self._model.name!r} was lost while it had the request; try again"
        return ApiError(503, message, code="model_lost")

    def _error_body(self, error: ApiError) -> dict[str, object]:
        return dict(self._apis.error_body(self._scope["path"], error, state_of(self._scope).request_id))


def _url_of(scope: Scope) -> URL:
    query = scope["query_string"].decode("latin-1")
    path = scope.get("raw_path", scope["path"].encode()).decode("latin-1").partition("?")[0]
    return URL(f"http://localhost{path}{'?' if query else ''}{query}", encoded=True)


def _headers_on(scope: Scope) -> list[tuple[str, str]]:
    kept = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name not in _NOT_SENT_ON and not name.startswith(_BROWSERS)
    ]
    return [*kept, ("host", "localhost"), ("x-request-id", state_of(scope).request_id)]


def _headers_back(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_SENT_BACK]
