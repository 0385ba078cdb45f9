"""JSON that fails after its head was sent: how its body breaks off on the wire, and what official clients raise."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from moeserve.httpserver.transport import sse
from moeserve.httpserver.transport.connection import BoundedHttpProtocol
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.sse import send_part
from tests.support.clients.raw_connection import all_that_comes

CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
Headers = Sequence[tuple[bytes, bytes]]


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[tuple[str, int]]:
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    state = ServerState()

    def protocol() -> BoundedHttpProtocol:
        return BoundedHttpProtocol(config=config, server_state=state, app_state={})

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    async with asyncio.timeout(60), server:
        yield server.sockets[0].getsockname()[:2]


def breaking_off(*parts: bytes, headers: Headers = ()) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts[:-1]:
            await send_part(send, part, True)
        await send_part(send, parts[-1], False, breaks_off=True)

    return app


def body_of(app: ASGIApp, request: bytes) -> bytes:
    async def ask() -> bytes:
        async with serving(app) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(request)
            answer = await all_that_comes(reader)
            writer.close()
            return answer

    return asyncio.run(ask()).partition(b"\r\n\r\n")[2]


TWO_REQUESTS = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n" * 2


@pytest.mark.parametrize(
    ("app", "request_bytes", "body"),
    [
        (breaking_off(b"\n", b'{"error":1}'), TWO_REQUESTS, b'1\r\n\n\r\nb\r\n{"error":1}\r\n'),
        (breaking_off(b"\n", b""), TWO_REQUESTS, b"1\r\n\n\r\n"),
        (breaking_off(b"ab", b"c", headers=[(b"content-length", b"9")]), TWO_REQUESTS, b"abc"),
        (breaking_off(b"\n", b"{}"), b"GET /x HTTP/1.0\r\n\r\n", b"\n{}"),
    ],
    ids=["chunks", "an empty last part", "a length", "HTTP/1.0"],
)
def test_a_body_that_breaks_off_is_the_connections_last(
    caplog: pytest.LogCaptureFixture, app: ASGIApp, request_bytes: bytes, body: bytes
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert body_of(app, request_bytes) == body
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class Late:
    """An API whose answers fail with `status` after their head."""

    def __init__(self, status: int) -> None:
        self.requests = 0
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests += 1
        while (await receive())["more_body"]:
            pass

        async def work() -> Mapping[str, Any]:
            await asyncio.sleep(0.05)
            raise ApiError(self._status, "it failed late")

        await sse._Awaited(work(), ApiError.body)(scope, receive, send)


def chat(url: str) -> None:
    from openai import APIConnectionError, OpenAI

    with (
        OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=1) as client,
        pytest.raises(APIConnectionError),
    ):
        print(client.chat.completions.create(model="m", messages=CHAT).choices[0])


def message(url: str) -> None:
    from anthropic import Anthropic, APIConnectionError

    with Anthropic(base_url=url, api_key="x", max_retries=1) as client, pytest.raises(APIConnectionError):
        print(client.messages.create(model="m", messages=CHAT, max_tokens=9).content[0])


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "BLANKS_AFTER_S", 0.01)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("ask", [chat, message], ids=["openai", "anthropic"])
def test_official_clients_raise_a_connection_error_and_repeat(ask: Callable[[str], None]) -> None:
    """They took a whole body with status 200 for an answer, and raised a TypeError where they looked for its text."""
    late = Late(503)

    async def play() -> None:
        async with serving(late) as (host, port):
            await asyncio.to_thread(ask, f"http://{host}:{port}")

    asyncio.run(play())
    assert late.requests == 2


@pytest.mark.usefixtures("_impatient")
def test_an_error_of_the_request_is_whole() -> None:
    """Its body keeps its end: a client has no reason to repeat the request."""
    body = body_of(Late(400), b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    chunks = body.split(b"\r\n")
    assert chunks[-3:] == [b"0", b"", b""]
    assert json.loads(b"".join(chunks[1:-3:2]))["error"]["message"] == "it failed late"
