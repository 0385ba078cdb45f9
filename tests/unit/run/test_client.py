"""The chat API of servers that do not answer as they should."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

import pytest

from moeserve.cli import running_server
from moeserve.cli.run import client as client_module
from moeserve.cli.run.client import ChatClient, address_of
from moeserve.cli.run.events import ChatError, Event, Piece, Waiting
from moeserve.cli.running_server import models_at, opener_of
from moeserve.errors import UserError
from tests.support.clients.raw_server import piece, raw_server, stream_of

BODY = {"messages": [{"role": "user", "content": "x"}], "stream": True}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def events_of(*parts: bytes) -> tuple[list[Event], str]:
    """What came, and the error behind it."""
    found: list[Event] = []
    with raw_server(parts) as (url, _):
        try:
            for event in ChatClient(url, None).events(BODY):
                found.append(event)
        except ChatError as error:
            return found, str(error)
    raise AssertionError("there was no error")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([stream_of(piece("half"))], "the connection to http://127.0.0.1:.* was lost; ask again when"),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\ndata:"], "was lost"),
        ([b""], "was lost"),
        ([b"not HTTP\r\n\r\n"], "was lost"),
        ([stream_of("{}", "[1]")], "the server sent something that is not an answer"),
        ([stream_of("{")], "the server sent something that is not an answer"),
        ([stream_of('{"error": {"message": "the worker ended"}}')], "^the server says: the worker ended$"),
        ([stream_of('{"error": "words"}')], "^the server says: words$"),
        ([stream_of('{"error": 7}')], "^the server failed$"),
        (
            [b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>"],
            "does not stream chats; check the address",
        ),
        ([b"HTTP/1.1 502 Bad\r\n\r\n<html>"], "answers with HTTP status 502; is it the right address"),
        ([b'HTTP/1.1 400 Bad\r\n\r\n{"error": {"message": "m", "code": "c"}}'], "^the server says: m$"),
        ([b"HTTP/1.1 401 No\r\n\r\n{}"], "needs an API key; give it with --api-key or MOESERVE_API_KEY"),
    ],
)
def test_what_a_server_may_do_instead(parts: Sequence[bytes], says: str) -> None:
    _, error = events_of(*parts)
    assert re.search(says, error), error


def test_what_came_before_a_loss_is_there() -> None:
    found, _ = events_of(stream_of(piece("half"), piece(" of it")))
    assert found == [Piece("half"), Piece(" of it")]


def test_values_of_any_type_are_passed_over() -> None:
    odd = [
        '{"choices": null}',
        '{"choices": [7]}',
        '{"choices": [{"delta": {"content": 7, "reasoning": []}}], "usage": 3, "prompt_progress": "x"}',
        '{"usage": {"prompt_tokens": "x"}, "timings": [1]}',
        "[DONE]",
    ]
    with raw_server([stream_of(*odd)]) as (url, _):
        events = list(ChatClient(url, None).events(BODY))
    assert not [event for event in events if isinstance(event, Piece)]


def test_what_a_question_waits_for() -> None:
    """A server of several models tells how far it is with loading, in comments."""
    answer = stream_of(piece("Yes."), "[DONE]").replace(
        b"data", b": loading: weights 40%\n\n: at work\n\ndata", 1
    )
    with raw_server([answer]) as (url, _):
        assert list(ChatClient(url, None).events(BODY)) == [Waiting("loading: weights 40%"), Piece("Yes.")]


def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ChatError, match=f"no server answers at {url} .*refused"):
        next(ChatClient(url, None).events(BODY))


@pytest.mark.parametrize("key", ["k\n", "clé", "a\tb"])
def test_a_key_that_http_cannot_send(key: str) -> None:
    """It was the server's fault in the words before: no moeserve was said to listen there."""
    with pytest.raises(UserError, match="--api-key: has a line break, or characters that are not ASCII"):
        next(ChatClient("http://127.0.0.1:9", key).events(BODY))
    with pytest.raises(UserError, match="--api-key: has a line break"):
        models_at("http://127.0.0.1:9", key)


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SILENCE_S", 0.2)

    def say_nothing(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"\r\n")
        connection.recv(1)

    with raw_server(say_nothing) as (url, _), pytest.raises(ChatError, match="has sent nothing for 0 s"):
        next(ChatClient(url, None).events(BODY))


def test_a_redirect_does_not_get_the_key() -> None:
    """Nor the question."""
    with raw_server([stream_of("[DONE]")]) as (elsewhere, got_elsewhere):
        redirect = f"HTTP/1.1 307 There\r\nLocation: {elsewhere}/x\r\n\r\n".encode()
        with (
            raw_server([redirect]) as (url, got),
            pytest.raises(ChatError, match=f"redirects to {elsewhere}/x"),
        ):
            next(ChatClient(url, "sk-secret").events(BODY))
        assert b"Bearer sk-secret" in got[0]
        with raw_server([redirect]) as (url, _), pytest.raises(UserError):
            running_server.models_at(url, "sk-secret")
        assert got_elsewhere == []


def test_which_addresses_a_proxy_is_for() -> None:
    direct = opener_of("http://127.0.0.1:1")
    for near in ("http://localhost:8000", "http://[::1]:8000", "http://192.168.1.5", "https://10.0.0.1"):
        assert opener_of(near) is direct
    for far in ("https://example.org", "http://8.8.8.8", "http://gpu-server:8000"):
        assert opener_of(far) is not direct


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("https://host/v1/", "https://host"),
        ("http://host/models/v1", "http://host/models"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "localhost:8000",
        "file:///etc/passwd",
        "http://",
        "",
        "http://h:x",
        "http://u:p@h",
        "http://h?q=1",
        "//h",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UserError, match="--url: "):
        address_of(text)
