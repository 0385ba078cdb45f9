"""What a request gets while its model is loaded, and that nothing that came too late is lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from moeserve.front import early_answer
from moeserve.front.early_answer import EarlyAnswer, EarlyEvents, EarlyJson, EarlyLines, error_event
from moeserve.httpserver.transport.sse import BEAT_S, BLANKS_AFTER_S, BREAKS_OFF
from tests.support.router.virtual_time import Clock


class Client:
    """What a client gets, with the times."""

    def __init__(self, clock: Clock) -> None:
        self.messages: list[tuple[float, Message]] = []
        self._clock = clock

    async def send(self, message: Message) -> None:
        self.messages.append((self._clock.now, message))

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for _, message in self.messages)

    @property
    def has_end(self) -> bool:
        return any(not message.get("more_body", True) for _, message in self.messages)

    @property
    def is_broken_off(self) -> bool:
        return BREAKS_OFF in self.messages[-1][1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(early_answer, "time", clock)
    return clock


async def after(seconds: float, result: str = "done") -> str:
    await asyncio.sleep(seconds)
    return result


def nothing(result: Any) -> None:
    raise AssertionError(f"{result} is given back")


def test_what_is_there_at_once_begins_nothing(clock: Clock) -> None:
    client = Client(clock)
    for early in (
        EarlyEvents(client.send, lambda: "loading"),
        EarlyJson(client.send),
        EarlyLines(client.send),
    ):
        assert clock.run(early.until(after(0.2), nothing)) == "done"
        assert not early.have_begun
    assert not client.messages


def test_comments_tell_what_is_new_and_keep_the_connection(clock: Clock) -> None:
    client = Client(clock)
    stages = {0: "waiting for memory", 3: "loading: weights 10%\r\n\r\ndata: x"}
    early = EarlyEvents(client.send, lambda: stages[max(s for s in stages if s <= clock.now)])
    assert clock.run(early.until(after(25.0), nothing)) == "done"
    text = client.body.decode()
    assert text.startswith(": waiting for memory\n\n")
    assert ": loading: weights 10%????data: x\n\n" in text, "a stage begins no event"
    assert text.count("\n\n") == 2 + int((25 - 3) // BEAT_S)
    assert client.messages[0][1]["status"] == 200


def test_json_gets_blanks_only_after_half_a_minute(clock: Clock) -> None:
    client = Client(clock)
    early = EarlyJson(client.send)
    clock.run(early.until(after(BLANKS_AFTER_S - 1), nothing))
    assert not client.messages
    clock.run(early.until(after(BLANKS_AFTER_S + 1), nothing))
    assert early.have_begun
    assert client.body == b"\n"
    clock.run(early.fail(404, {"error": {"message": "too late"}}))
    assert client.body == b'\n{"error":{"message":"too late"}}'
    assert client.has_end
    assert not client.is_broken_off


def test_json_breaks_off_if_the_server_fails(clock: Clock) -> None:
    """Then clients repeat the request."""
    client = Client(clock)
    early = EarlyJson(client.send)
    clock.run(early.until(after(BLANKS_AFTER_S + 1), nothing))
    clock.run(early.fail(503, {"error": {"message": "lost"}}))
    assert client.body == b'\n{"error":{"message":"lost"}}'
    assert client.is_broken_off


def test_lines_of_json_get_blanks_that_every_line_may_begin_with(clock: Clock) -> None:
    client = Client(clock)
    early = EarlyLines(client.send)
    clock.run(early.until(after(BLANKS_AFTER_S - 1), nothing))
    assert not client.messages
    clock.run(early.until(after(BLANKS_AFTER_S + 2 * BEAT_S), nothing))
    assert early.have_begun
    clock.run(early.fail(503, {"error": "too late"}))
    assert client.body.decode().startswith("  ")
    (line,) = client.body.decode().splitlines()
    assert json.loads(line) == {"error": "too late"}
    assert client.has_end


@pytest.mark.parametrize(
    ("body", "event"),
    [
        ({"error": {"message": "m"}}, b'data: {"error":{"message":"m"}}\n\n'),
        ({"type": "error", "error": {}}, b'event: error\ndata: {"type":"error","error":{}}\n\n'),
    ],
)
def test_a_stream_ends_with_an_error_of_its_api(clock: Clock, body: dict[str, Any], event: bytes) -> None:
    client = Client(clock)
    clock.run(EarlyEvents(client.send, lambda: "").fail(503, body))
    assert client.body == event == error_event(body)
    assert client.has_end


@pytest.mark.parametrize("kind", [EarlyEvents, EarlyJson])
def test_what_came_for_a_client_that_has_gone_is_given_back(clock: Clock, kind: type[EarlyAnswer]) -> None:
    """Else the model's server would count a request for ever, and never be unloaded."""
    client = Client(clock)
    early = EarlyEvents(client.send, lambda: "x") if kind is EarlyEvents else EarlyJson(client.send)
    given_back: list[str] = []

    async def deaf() -> str:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            return "came in the same moment"
        return "done"

    async def work() -> None:
        waiting = asyncio.create_task(early.until(deaf(), given_back.append))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled()

    clock.run(work())
    assert given_back == ["came in the same moment"]
