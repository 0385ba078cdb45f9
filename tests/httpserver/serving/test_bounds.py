"""Who is let in, and what is too large: keys, bodies, headers, and prompts that take long to read."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import httpx

from moeserve.httpserver.transport.connection import MAX_HEAD_BYTES
from moeserve.httpserver.transport.middleware import MIN_BODY_LIMIT
from moeserve.messages.schema import EngineReady
from moeserve.messages.steps import WorkerReady
from tests.support.measuring.event_loop import longest_while
from tests.support.servers.http_harness import HttpServer, http_server
from tests.support.servers.waiting import within


def test_api_key_guards_all_but_health_and_metrics() -> None:
    with http_server(api_key=("secret-key",)) as server:
        for path in ("/health", "/metrics"):
            assert httpx.get(server.url + path).status_code == 200
        wrong: list[dict[str, str]] = [
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer secret-key-and-more"},
            {"authorization": "Basic secret-key"},
            {"authorization": "secret-key"},
        ]
        for path in ("/v1/models", "/openapi.json", "/nothing"):
            for headers in wrong:
                response = httpx.get(server.url + path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
        right = {"authorization": "Bearer secret-key"}
        assert server.post("/v1/completions", {"prompt": "Hi"}, headers=right).status_code == 200


def test_a_large_body_is_refused(server: HttpServer) -> None:
    def in_chunks() -> Iterator[bytes]:
        for _ in range(MIN_BODY_LIMIT // (1 << 20) + 2):
            yield b" " * (1 << 20)

    headers = {"content-type": "application/json"}
    announced = httpx.post(
        server.url + "/v1/completions", content=b" " * (MIN_BODY_LIMIT + 1), headers=headers
    )
    chunked = httpx.post(server.url + "/v1/completions", content=in_chunks(), headers=headers)
    for response in (announced, chunked):
        assert response.status_code == 413
        assert str(MIN_BODY_LIMIT) in response.json()["error"]["message"]


def test_large_headers_are_refused(server: HttpServer) -> None:
    fits = httpx.get(server.url + "/health", headers={"x-filler": "x" * (MAX_HEAD_BYTES // 2)})
    assert fits.status_code == 200
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        with contextlib.suppress(ConnectionError):
            for i in range(1000):
                connection.sendall(f"x-filler-{i}: {'x' * 1000}\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 431 ")


def test_a_long_prompt_holds_up_nobody() -> None:
    """Tokenising megabytes takes a second; it must not take the event loop's."""
    with http_server() as server:
        size = server.tokenizer.vocabulary.size
        server.send(EngineReady(WorkerReady(1 << 23, 8, 1 << 23, size, 0, 0, "a test")))
        body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 60_000}
        assert within(
            30, lambda: server.post("/tokenize", {"prompt": "Hi"}).json()["max_model_len"] == 1 << 23
        )
        assert longest_while(server, lambda: server.post("/tokenize", body)) < 0.3


def test_an_announced_large_body_is_refused_before_it_is_sent(server: HttpServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {MIN_BODY_LIMIT + 1}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
