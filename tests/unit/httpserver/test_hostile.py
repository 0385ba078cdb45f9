"""Clients that send too slowly, too much, or what only a program would: they get an error, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from pydantic import ValidationError
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from moeserve.config import ServerConfig
from moeserve.httpserver.app import APIS, build_app
from moeserve.httpserver.batches.queries import API_NAME as BATCHES
from moeserve.httpserver.generation.chat.chat_tools import arguments_for_template
from moeserve.httpserver.generation.engine import open_generations
from moeserve.httpserver.generation.engine.engine_client import EngineClient
from moeserve.httpserver.generation.engine.engine_state import EngineState
from moeserve.httpserver.generation.engine.generation_stream import GenerationStream
from moeserve.httpserver.generation.request.asked import Asked
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.resolve.request_builder import check_sizes
from moeserve.httpserver.generation.resolve.resolved import Resolved
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.httpserver.transport import connection, middleware
from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.connection import BoundedHttpProtocol
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.hosts import KnownHost
from moeserve.httpserver.transport.middleware import BodyLimit, body_limit
from moeserve.httpserver.transport.request_model import MAX_VALUES
from moeserve.httpserver.transport.request_state import state_of
from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.messages.schema import Abort, GenerateBatch, GenerateRequest
from tests.support.clients.raw_connection import all_that_comes, reads_all
from tests.support.servers.rpc_child import READY

MILLION = 1_000_000
USER = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "make", "cause"),
    [
        ("/v1/chat/completions", lambda: USER | {"stop": [""] * MILLION}, "stop.0: "),
        ("/v1/chat/completions", lambda: USER | {f"x{i}": 1 for i in range(200_000)}, "has 200001 fields"),
        (
            "/v1/chat/completions",
            lambda: USER | {"logit_bias": {f"x{i}": 1 for i in range(200_000)}},
            "logit_bias",
        ),
        (
            "/v1/chat/completions",
            lambda: USER | {"guided_json": {"enum": [[]] * MILLION}},
            f"more than {MAX_VALUES}",
        ),
        ("/v1/responses", lambda: {"input": [{}] * MILLION}, "input.0: "),
        ("/v1/messages", lambda: {"messages": [{"role": "user", "content": [{}] * MILLION}]}, "content"),
        ("/detokenize", lambda: {"tokens": ["x"] * MILLION}, "tokens.0: "),
    ],
    ids=["strings", "fields", "keys", "schema", "items", "parts", "ids"],
)
def test_a_million_mistakes_are_one_error(path: str, make: Callable[[], dict[str, Any]], cause: str) -> None:
    """Before, 25 s and 2 GB for 4 MB. Bodies are made here: each process that runs tests imports this module."""
    body = make()
    model = next(model for api in APIS for model in api.bodies if _takes(model, path))
    started = time.thread_time()
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    errors = caught.value.errors(include_url=False, include_context=False)
    assert time.thread_time() - started < 5.0
    assert len(errors) < 10
    assert any(cause in ".".join(map(str, e["loc"])) + f": {e['msg']}" for e in errors), errors[:3]


def _takes(model: type, path: str) -> bool:
    names = {
        "/v1/chat/completions": "ChatCompletionRequest",
        "/v1/responses": "ResponsesRequest",
        "/v1/messages": "MessagesRequest",
        "/detokenize": "DetokenizeRequest",
    }
    return model.__name__ == names[path]


async def exchange(head: bytes, more: bytes) -> bytes:
    """What a server answers to a request whose end never comes: `more`, again and again."""
    config = uvicorn.Config(reads_all, http=BoundedHttpProtocol, lifespan="off", log_config=None)
    config.load()

    def protocol() -> BoundedHttpProtocol:
        return BoundedHttpProtocol(config=config, server_state=ServerState(), app_state={})

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"POST /x HTTP/1.1\r\nHost: x\r\n" + head)
        answer = asyncio.create_task(all_that_comes(reader))
        sent = 0
        while not answer.done():
            writer.write(more)
            sent += len(more)
            assert sent < 10 << 20
            await asyncio.sleep(0.02)
        writer.close()
        return await answer


def test_a_body_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.5)
    answer = asyncio.run(exchange(b"Content-Length: 1000000\r\n\r\n", b" "))
    assert answer.startswith(b"HTTP/1.1 408 "), answer
    assert "0.5 s" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_body_that_comes_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_INTERVAL_S", 0.2)
    answer = asyncio.run(exchange(b"Content-Length: 10000000\r\n\r\n", b" " * 100))
    assert answer.startswith(b"HTTP/1.1 408 "), answer
    assert "0.2 s must bring 32 KiB" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 1.5)
    monkeypatch.setattr(connection, "BODY_INTERVAL_S", 0.6)
    monkeypatch.setattr(connection, "BODY_INTERVAL_BYTES", 1)
    answer = asyncio.run(exchange(b"Content-Length: 10000000\r\n\r\n", b" " * 20_000))
    assert "within 1.5 s" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize(
    "more", [b"x-filler: " + b"x" * 10_000 + b"\r\n", b"x" * 10_000], ids=["many", "one"]
)
def test_trailers_without_end_are_refused(more: bytes) -> None:
    chunked = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: "
    assert asyncio.run(exchange(chunked, more)).startswith(b"HTTP/1.1 413 ")


class HeldBodies:
    """Requests whose bodies have been read: their statuses come when they are released."""

    def __init__(self) -> None:
        self.limit = BodyLimit(self._app, ApiTable(APIS), lambda: None)
        self._waiting: list[asyncio.Event] = []

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        self._waiting.append(asyncio.Event())
        await self._waiting[-1].wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def begin(self, *pieces: int, key: str = "") -> asyncio.Task[int]:
        """A body of pieces of so many bytes."""
        task = asyncio.create_task(self._status(list(pieces), key))
        await asyncio.sleep(0)
        return task

    def release(self) -> None:
        for event in self._waiting:
            event.set()

    async def _status(self, pieces: list[int], key: str) -> int:
        sent: list[Message] = []

        async def receive() -> Message:
            return {
                "type": "http.request",
                "body": b" " * (pieces.pop(0) if pieces else 0),
                "more_body": bool(pieces),
            }

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/", "headers": []}
        state_of(scope).tenant = key
        await self.limit(scope, receive, send)
        status: int = sent[0]["status"]
        return status


def test_bodies_of_all_requests_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_BODIES_BYTES", 1000)

    async def run() -> None:
        bodies = HeldBodies()
        first = await bodies.begin(600)
        assert await (await bodies.begin(600)) == 503
        bodies.release()
        assert await first == 200
        second = await bodies.begin(600)  # the first has given its room back
        bodies.release()
        assert await second == 200

    asyncio.run(run())


def test_bodies_of_one_key_leave_room_for_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_BODIES_BYTES", 1000)

    async def run() -> None:
        bodies = HeldBodies()
        held = [await bodies.begin(200, key="greedy") for _ in range(2)]
        assert await (await bodies.begin(100, 100, key="greedy")) == 503  # half of all is its share
        held.append(await bodies.begin(200, 200, key="light"))  # an only body, beyond a third
        assert await (await bodies.begin(1, key="light")) == 503
        held.append(await bodies.begin(150, key="third"))
        bodies.release()
        assert [await one for one in held] == [200] * 4
        alone = await bodies.begin(900, key="greedy")
        bodies.release()
        assert await alone == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        *[("127.0.0.1:8000", True), ("[::1]:8000", True), ("localhost", True), ("LOCALHOST:80", True)],
        *[
            ("moeserve:8000", True),
            ("host.docker.internal:8000", True),
            ("a.localhost", True),
            ("mine.org", True),
        ],
        *[("evil.example:8000", False), ("127.0.0.1.evil.example", False), ("localhost.evil.example", False)],
        *[("1.2.3.4.5", False), ("evil.example.", False), ("mine.org.evil.example", False)],
    ],
)
def test_only_names_that_are_ours_are_answered(host: str, answered: bool) -> None:
    known = KnownHost(reads_all, ApiTable(APIS), ["mine.org"])
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "path": "/",
        "headers": [(b"host", host.encode())],
        "state": {"request_id": "x"},
    }
    asyncio.run(known(scope, receive, send))
    assert sent[0]["status"] == (200 if answered else 403)
    if not answered:
        assert b"--allowed-host" in sent[1]["body"]


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({}, 403),
        ({"allowed_host": ("evil.example",)}, 200),
        ({"host": "0.0.0.0"}, 200),
        ({"api_key": ("k",)}, 200),
    ],
    ids=["by default", "named", "open to the network", "with a key"],
)
def test_where_a_hosts_name_matters(settings: dict[str, Any], status: int) -> None:
    config = ServerConfig(**settings)
    engine: Any = types.SimpleNamespace(tracer=None, state=EngineState(True, ready=READY))
    service: Any = types.SimpleNamespace(
        config=config, metrics=Metrics("m"), engine=engine, model_name="m", api_states={BATCHES: None}
    )
    client = TestClient(build_app(service), base_url="http://evil.example")
    assert client.get("/health").status_code == status


def test_a_bodys_limit_follows_the_context() -> None:
    sizes = [body_limit(context) for context in (None, 2048, 262_144, 1 << 24)]
    assert sizes == [32 << 20, 4 << 20, 16 << 20, 32 << 20]


def test_arguments_beyond_reason_stay_text() -> None:
    assert arguments_for_template('{"a": [1]}') == {"a": [1]}
    text = '{"a": [' + ",".join(["[]"] * MILLION) + "]}"
    assert arguments_for_template(text) is text


def test_small_bodies_that_ask_for_very_much() -> None:
    """A grammar of 3.9 MB with 2,000 choices took 9.6 GB; 16 choices of echoed prompts with log-probabilities 1 GB."""

    def check(*prompts: list[int], grammar: str = "", n: int = 1) -> None:
        asked = Asked(Caller(0.0), prompts, n=n, prompt_logprobs=None if grammar else 20)
        check_sizes(Resolved(asked, prompts, grammar=grammar))

    large = "x" * 4_000_000
    check([1], grammar=large)
    with pytest.raises(ApiError, match="67108864 at most"):
        check(*[[1]] * 20, grammar=large)
    check([1] * 2000, n=16)
    with pytest.raises(ApiError, match="1000000 at most"):
        check(*[[1] * 2000] * 8, n=16)
    check([1] * 100_000)


def test_grammars_of_all_requests_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_generations, "MAX_CONSTRAINT_BYTES", 1000)
    sent: list[object] = []

    class Router:
        async def send(self, message: object) -> None:
            sent.append(message)

    async def ask() -> None:
        engine = EngineClient(Router(), None, Metrics("m"), state=EngineState(True, ready=READY))  # type: ignore[arg-type]
        sampling = SamplingParams(max_tokens=1, grammar="x" * 400)
        requests = [GenerateRequest(id, bytes(4), sampling, TextOptions(), 0.0) for id in range(4)]
        async with GenerationStream(engine, requests[:2], Caller(0.0)):
            with pytest.raises(ApiError, match="too much memory"):
                async with GenerationStream(engine, requests[2:3], Caller(0.0)):
                    pass
        async with GenerationStream(engine, requests[3:], Caller(0.0)):  # the others have left
            pass
        await engine.flush()

    asyncio.run(ask())
    batch, last = [message for message in sent if not isinstance(message, Abort)]
    assert isinstance(batch, GenerateBatch)
    assert isinstance(last, GenerateRequest)
    assert [request.id for request in [*batch.unpacked(), last]] == [0, 1, 3]
