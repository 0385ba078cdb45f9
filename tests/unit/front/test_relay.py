"""A request whose server ends before its answer's first output is sent to the next server. Over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from moeserve.front.pool import ModelPool
from moeserve.front.relay import MOST_SENDINGS, Relay
from moeserve.front.requested_model import Asked
from moeserve.httpserver.app import APIS
from moeserve.httpserver.transport import sse
from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.errors import ApiError
from tests.support.front.socket_models import EVENTS, Life, SocketInstance, SocketModels, chunk, socket_pool

ANSWER = b'data: {"text": "hello"}\n\n'
WHOLE = Life(EVENTS + chunk(ANSWER) + b"0\r\n\r\n", ends=False)
COMMENT = b": at work\n\n"
STREAM = Asked(streams_events=True)
CHAT = "/v1/chat/completions"
BODY = b'{"model": "a", "stream": true}'


class Client:
    """Sends one request, and keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self.messages if "status" in message]


async def answered(client: Client, pool: ModelPool, path: str, asked: Asked, **options: bool) -> None:
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    relay = Relay(pool, ApiTable(APIS))
    await relay.answer(scope, client.receive, client.send, pool.find("a"), asked, BODY, **options)


def relayed(
    folder: Path,
    *lives: Life,
    asked: Asked = STREAM,
    before: Callable[[ModelPool, SocketModels], Any] | None = None,
    **options: bool,
) -> tuple[Client, SocketModels, ModelPool]:
    """Sends a request to model a, whose servers live as told. Raises ApiError."""
    client = Client()

    async def work() -> tuple[Client, SocketModels, ModelPool]:
        pool, world = socket_pool(folder, *lives)
        try:
            if before is not None:
                await before(pool, world)
            await answered(client, pool, CHAT, asked, **options)
        finally:
            await pool.close()
        return client, world, pool

    return asyncio.run(asyncio.wait_for(work(), 20))


CUT = {
    "before its head": Life(),
    "after its head": Life(EVENTS),
    "after a comment": Life(EVENTS + chunk(COMMENT)),
    "before it is reached": Life(is_unreachable=True),
}


@pytest.mark.parametrize("where", CUT)
def test_a_request_without_output_gets_the_next_server(tmp_path: Path, where: str) -> None:
    async def soon(pool: ModelPool, world: SocketModels) -> None:
        if CUT[where].is_unreachable:  # it is noticed when the request has failed already
            await pool.acquire(pool.find("a"))
            asyncio.get_running_loop().call_later(0.1, world.started[0].die)

    client, world, pool = relayed(tmp_path, CUT[where], WHOLE, before=soon)
    assert client.body.removeprefix(COMMENT) == ANSWER
    assert client.statuses == [200], "one head, whichever server it is of"
    assert pool.find("a").num_sent_again == 1
    assert world.started[-1].requests[0].endswith(BODY)


def test_a_server_that_ends_between_lease_and_sending_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session of its connections is closed by then: the request waits for the next one."""
    acquire = ModelPool.acquire

    async def slowly(pool: ModelPool, model: Any) -> Any:
        instance = await acquire(pool, model)
        assert isinstance(instance, SocketInstance)
        if instance.life is not WHOLE:
            instance.die()
            while model.instance is instance:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)  # it is stopped
            assert instance.session.closed
        return instance

    monkeypatch.setattr(ModelPool, "acquire", slowly)
    client, world, _ = relayed(tmp_path, Life(ends=False), WHOLE)
    assert (client.statuses, client.body) == ([200], ANSWER)
    assert [len(one.requests) for one in world.started] == [0, 1]


def test_a_request_that_ends_each_server_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as refused:
        relayed(tmp_path, *(Life() for _ in range(MOST_SENDINGS + 1)))
    assert refused.value.status == 503


def test_an_answer_that_has_begun_is_not_sent_again(tmp_path: Path) -> None:
    client, world, _ = relayed(tmp_path, Life(EVENTS + chunk(ANSWER)), WHOLE)
    assert client.body.startswith(ANSWER)
    error = json.loads(client.body[len(ANSWER) :].removeprefix(b"data: "))["error"]
    assert error["code"] == "model_lost"
    assert len(world.started) == 1
    assert client.messages[-1]["more_body"] is False


def test_half_of_a_json_answer_is_cut(tmp_path: Path) -> None:
    half = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    client, world, _ = relayed(tmp_path, Life(half + b'{"id": 1'), WHOLE, asked=Asked())
    assert client.body == b'{"id": 1'
    assert sse.BREAKS_OFF in client.messages[-1], "no client takes it for a whole answer"
    assert len(world.started) == 1
    client, _, _ = relayed(tmp_path, Life(half + b"\n\n"), WHOLE, asked=Asked())
    assert client.body == b"\n\n" + ANSWER


def test_an_answer_that_its_server_breaks_off_is_not_sent_again(tmp_path: Path) -> None:
    """It says why: the request has failed, and the server may be well."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    error = b'{"error":{"message":"it took longer than --request-timeout"}}'
    client, world, _ = relayed(tmp_path, Life(head + chunk(b"\n") + chunk(error)), WHOLE, asked=Asked())
    assert client.body == b"\n" + error
    assert sse.BREAKS_OFF in client.messages[-1]
    assert len(world.started) == 1


def test_what_may_not_be_repeated_is_sent_once(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as refused:
        relayed(tmp_path, Life(), WHOLE, is_repeatable=False)
    assert refused.value.code == "model_lost"


def test_only_requests_of_ollamas_api_say_how_long_a_model_stays(tmp_path: Path) -> None:
    """ollama/ollama#9355: a request of another API had the model unloaded at the usual time again."""
    limits: list[float | None] = []

    async def earlier(pool: ModelPool, world: SocketModels) -> None:
        for path, seconds in (("/api/chat", 300.0), (CHAT, None), ("/api/chat", None)):
            await answered(Client(), pool, path, Asked(keep_alive=seconds))
            limits.append(pool.find("a").idle_limit)

    relayed(tmp_path, WHOLE, before=earlier)
    assert limits == [300.0, 300.0, None]


def test_a_client_that_reads_no_more_does_not_keep_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ollama/ollama#7779: the model that was to make room stayed, and no other was loaded any more."""

    class Stalled(Client):
        async def send(self, message: Message) -> None:
            if message.get("body"):
                await asyncio.Event().wait()

    monkeypatch.setattr(sse, "SEND_TIMEOUT_S", 0.05)
    running: list[int] = []

    async def earlier(pool: ModelPool, world: SocketModels) -> None:
        await answered(Stalled(), pool, CHAT, STREAM)
        running.append(pool.num_running)

    relayed(tmp_path, WHOLE, before=earlier)
    assert running == [0]
