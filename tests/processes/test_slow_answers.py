"""Answers that take longer than proxies and clients wait for a byte: comments in streams, blanks before JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx
import pytest
from starlette.types import Message, Scope

from moeserve.httpserver.transport import sse
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.sse import EventStream
from tests.support.router.virtual_time import Clock
from tests.support.servers.http_harness import HttpServer, silence

SCOPE: Scope = {"type": "http"}
CLOCK = Clock()
COMMENTS_AFTER_S = sse.COMMENTS_AFTER_S  # of the real process


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "COMMENTS_AFTER_S", 0.05)
    monkeypatch.setattr(sse, "BLANKS_AFTER_S", 0.05)
    monkeypatch.setattr(sse, "BEAT_S", 0.05)
    monkeypatch.setattr(sse, "time", CLOCK)


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def sent_by(response: Any) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    CLOCK.run(response(SCOPE, never, send))
    return messages


def body_of(messages: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


async def chunks(*waits: float, error: ApiError | None = None) -> AsyncGenerator[Mapping[str, Any], None]:
    for number, wait in enumerate(waits):
        await asyncio.sleep(wait)
        if error is not None and number == len(waits) - 1:
            raise error
        yield {"n": number}


def test_a_stream_that_waits_has_its_head_and_comments() -> None:
    messages = sent_by(EventStream(chunks(0.18, 0.0, 0.12)))
    start, *_ = messages
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    events = body_of(messages).decode().split("\n\n")
    assert events[0].startswith(":")
    first, second = events.index('data: {"n":0}'), events.index('data: {"n":2}')
    assert events[:first] == [": at work"] * 3
    assert events[first + 1] == 'data: {"n":1}'
    assert events[first + 2 : second] == [": at work"] * 2
    assert events[second + 1 :] == ["data: [DONE]", ""]


def test_a_stream_that_is_quick_has_no_comments() -> None:
    assert b": at work" not in body_of(sent_by(EventStream(chunks(0.0, 0.0))))


def test_a_failure_before_the_head_is_no_stream_and_later_an_event() -> None:
    with pytest.raises(ApiError):
        sent_by(EventStream(chunks(0.0, error=ApiError(503, "full"))))
    events = body_of(sent_by(EventStream(chunks(0.12, error=ApiError(503, "full"))))).decode().split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["message"] == "full"
    assert events[-2:] == ["data: [DONE]", ""]


async def value(wait: float, error: ApiError | None = None) -> dict[str, Any]:
    await asyncio.sleep(wait)
    if error is not None:
        raise error
    return {"a": 1}


def awaited(wait: float, error: ApiError | None = None) -> Any:
    return sse._Awaited(value(wait, error), ApiError.body)


def test_json_that_waits_has_blanks_before_it() -> None:
    quick, slow = sent_by(awaited(0.0)), sent_by(awaited(0.18))
    assert dict(quick[0]["headers"])[b"content-length"] == b"7"
    assert body_of(quick) == b'{"a":1}'
    assert b"content-length" not in dict(slow[0]["headers"])
    assert body_of(slow).startswith(b"\n" * 3 + b"{")
    assert json.loads(body_of(slow)) == {"a": 1}
    assert [message["more_body"] for message in slow[1:]] == [True] * (len(slow) - 2) + [False]


@pytest.mark.parametrize("status", [400, 404, 500, 503, 504])
def test_a_failure_after_blanks_is_json_of_an_error(status: int) -> None:
    """A failure of the server breaks the body off: clients repeat the request. A failure in time has its own status."""
    with pytest.raises(ApiError):
        sent_by(awaited(0.0, ApiError(status, "broken")))
    slow = sent_by(awaited(0.12, ApiError(status, "broken")))
    assert json.loads(body_of(slow))["error"]["message"] == "broken"
    assert [message["more_body"] for message in slow[1:]] == [True] * (len(slow) - 2) + [False]
    assert sse.BREAKS_OFF not in slow[-2]
    assert slow[-1].get(sse.BREAKS_OFF, False) == (status >= 500)


def test_a_queued_stream_has_its_head_at_once(server: HttpServer) -> None:
    """From the real process, whose patience is the real one."""
    assert COMMENTS_AFTER_S < 2.0
    server.answer = silence
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {
            "model": "echo-model",
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "Hi"}],
        },
    }
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path, body in bodies.items():
            with client.stream("POST", path, json=body | {"stream": True}) as response:
                assert response.status_code == 200
                assert next(response.iter_lines()) == ": at work"
