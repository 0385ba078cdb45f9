"""Refusals are counted by reason, whichever API refuses and whether httpserver or the router does."""

from __future__ import annotations

import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from moeserve.httpserver.transport.sse import COMMENTS_AFTER_S
from moeserve.messages.refusal import Refusal
from moeserve.messages.schema import GenerateRequest, RequestError
from tests.support.servers.http_harness import NAME, HttpServer, http_server

MESSAGES = [{"role": "user", "content": "Hi"}]
LONG = "word " * 5000  # more than the context
# Of each API: a path, a body that it serves, and fields that make the prompt too long.
APIS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "openai": (
        "/v1/chat/completions",
        {"messages": MESSAGES},
        {"messages": [{"role": "user", "content": LONG}]},
    ),
    "completions": ("/v1/completions", {"prompt": "Hi"}, {"prompt": LONG}),
    "responses": ("/v1/responses", {"input": "Hi"}, {"input": LONG}),
    "anthropic": (
        "/v1/messages",
        {"model": NAME, "messages": MESSAGES, "max_tokens": 4},
        {"messages": [{"role": "user", "content": LONG}]},
    ),
    "ollama": (
        "/api/chat",
        {"model": NAME, "messages": MESSAGES},
        {"messages": [{"role": "user", "content": LONG}]},
    ),
    "llama_server": ("/completion", {"prompt": "Hi"}, {"prompt": LONG}),
    "lightllm": ("/generate", {"inputs": "Hi"}, {"inputs": LONG}),
}


def counted(server: HttpServer) -> dict[str, float]:
    """By reason, without those that there were none of."""
    prefix = "moeserve:request_refusals_total"
    return {
        name.partition('reason="')[2].partition('"')[0]: value
        for name, value in server.metrics().items()
        if name.startswith(prefix) and value
    }


def grown(server: HttpServer, before: dict[str, float]) -> dict[str, float]:
    now = counted(server)
    return {
        reason: now[reason] - before.get(reason, 0) for reason in now if now[reason] != before.get(reason, 0)
    }


def assert_refused(server: HttpServer, path: str, body: dict[str, Any], status: int) -> httpx.Response:
    """A stream that has waited for COMMENTS_AFTER_S has status 200, as on a busy machine; no other has."""
    refused = server.post(path, body)
    if refused.status_code == 200 and body["stream"]:
        assert refused.elapsed.total_seconds() >= COMMENTS_AFTER_S
        assert "error" in refused.text
    else:
        assert refused.status_code == status
    return refused


def test_every_reason_is_there_from_the_start(server: HttpServer) -> None:
    names = server.metrics()
    for reason in Refusal:
        assert f'moeserve:request_refusals_total{{model_name="{NAME}",reason="{reason}"}}' in names


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_httpserver_says_why_in_every_api(server: HttpServer, api: str, stream: bool) -> None:
    path, body, too_long = APIS[api]
    before = counted(server)
    assert_refused(server, path, body | too_long | {"stream": stream}, 400)
    assert grown(server, before) == {"too_long": 1}
    before = counted(server)
    assert server.post(path, {"stream": stream}).status_code == 400, "without a prompt"
    assert grown(server, before) == {"invalid": 1}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_router_says_why_in_every_api(server: HttpServer, api: str, stream: bool) -> None:
    path, body, _ = APIS[api]

    def full(server: HttpServer, request: GenerateRequest) -> None:
        server.send(RequestError(request.id, 503, "busy", retry_after=3, refusal=Refusal.QUEUE_FULL))

    server.answer = full
    before = counted(server)
    refused = assert_refused(server, path, body | {"stream": stream}, 503)
    assert refused.headers.get("retry-after") == (None if refused.status_code == 200 else "3")
    assert grown(server, before) == {"queue_full": 1}


def test_a_failure_is_no_refusal(server: HttpServer) -> None:
    server.answer = lambda server, request: server.send(RequestError(request.id, 500, "it crashed"))
    before = counted(server)
    assert server.post("/v1/completions", {"prompt": "Hi"}).status_code == 500
    assert grown(server, before) == {}


def test_what_no_route_sees_is_counted(server: HttpServer) -> None:
    before = counted(server)
    assert server.get("/v1/nothing").status_code == 404
    assert grown(server, before) == {"not_found": 1}
    before = counted(server)
    unsupported = server.post("/v1/completions", {"prompt": "Hi"}, headers={"content-encoding": "br"})
    assert unsupported.status_code == 415
    assert grown(server, before) == {"unsupported": 1}


def test_a_missing_key_is_counted() -> None:
    with http_server(api_key=("secret",)) as server:
        assert server.get("/v1/models").status_code == 401
        assert counted(server) == {"auth": 1}


def connect(server: HttpServer) -> socket.socket:
    url = urlsplit(server.url)
    return socket.create_connection((url.hostname or "", url.port or 0))


BEGIN = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
REFUSED_CONNECTIONS = {
    "no HTTP": (b"\x16\x03\x01 hello\r\n\r\n", "invalid"),
    "no Host": (b"GET /health HTTP/1.1\r\n\r\n", "invalid"),
    "a long target": (b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 9000), "too_large"),
    "a long head": (BEGIN + b"A: %s\r\n\r\n" % (b"x" * (130 << 10)), "too_large"),
    "a coding": (BEGIN + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "unsupported"),
    "a trailer": (
        BEGIN + b"Transfer-Encoding: chunked\r\n\r\n1;x=%s\r\n{\r\n" % (b"x" * (65 << 10)),
        "too_large",
    ),
}


@pytest.mark.parametrize("sent", REFUSED_CONNECTIONS.values(), ids=list(REFUSED_CONNECTIONS))
def test_what_ends_with_its_connection_is_counted(server: HttpServer, sent: tuple[bytes, str]) -> None:
    """Before any middleware: by the connection itself."""
    data, reason = sent
    before = counted(server)
    with connect(server) as client:
        client.sendall(data)
        assert client.recv(12).startswith(b"HTTP/1.1 ")
    assert grown(server, before) == {reason: 1}


def test_connections_that_there_is_no_room_for_are_counted() -> None:
    with http_server(max_idle_connections_per_address=2) as server:
        before = counted(server)
        clients = [connect(server) for _ in range(5)]
        until = time.monotonic() + 60
        while grown(server, before).get("connections", 0) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert grown(server, before)["connections"] >= 2
        for client in clients:
            client.close()
