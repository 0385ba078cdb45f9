"""HTTP as clients of all kinds speak it: upgrades that are ignored, one Host, HTTP/1.0, long heads, encoded bodies."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import resource
import socket
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.bounded_config import SPARE_CONNECTIONS
from moeserve.httpserver.transport.connection import SPARE_DESCRIPTORS
from moeserve.httpserver.transport.decompress import Decompress
from moeserve.httpserver.transport.errors import ApiError
from tests.support.servers.engine_messages import ready_message
from tests.support.servers.http_harness import TLS, HttpServer, echo, silence
from tests.support.servers.waiting import free_port, within

BODY = b'{"prompt":"Hi","max_tokens":1}'
HOST = b"Host: localhost"
UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__")


def request(*headers: bytes, version: bytes = b"1.1", body: bytes = BODY) -> bytes:
    length = b"Content-Length: %d" % len(body)
    lines = [b"POST /v1/completions HTTP/" + version, b"Content-Type: application/json", length, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def is_whole(said: bytes) -> bool:
    """Whether an answer has come to its end; of one that has no length, only the connection's end says so."""
    head, end, body = said.partition(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line]
    return bool(end and lengths) and len(body) >= lengths[0]


def exchange(server: HttpServer, *packets: bytes, answers: int = 1) -> bytes:
    """Sends the packets; returns what the server says until it closes, or is silent behind that number of answers."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        for packet in packets[:-1]:
            connection.sendall(packet)
            connection.settimeout(0.15)
            with contextlib.suppress(TimeoutError):
                assert not connection.recv(1), "an answer before the request's end"
        connection.sendall(packets[-1])
        connection.settimeout(30.0)
        said = b""
        with contextlib.suppress(TimeoutError):
            while more := connection.recv(1 << 16):
                said += more
                *_, last = said.split(b"HTTP/1.1 ")
                if len(statuses(said)) >= answers and is_whole(last):
                    connection.settimeout(0.3)  # for what should not come
    return said


def statuses(said: bytes) -> list[int]:
    return [int(part[:3]) for part in said.split(b"HTTP/1.1 ")[1:]]


def test_an_upgrade_is_ignored_and_the_body_read(server: HttpServer) -> None:
    asked = request(HOST, *UPGRADE)
    for packets in ((asked + BODY,), (asked, BODY), (asked[:60], asked[60:] + BODY)):
        said = exchange(server, *packets)
        assert statuses(said) == [200]
        assert b'"text_completion"' in said


def test_nothing_is_smuggled_behind_an_upgrade(server: HttpServer) -> None:
    inner = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
    body = b'{"prompt":"' + b"x" * (100 - len(inner)) + b'"}' + inner
    said = exchange(server, request(HOST, *UPGRADE, body=body), body)
    assert statuses(said) == [400]  # the whole is one body, and no JSON
    assert b"echo-model" not in said
    twice = request(HOST, *UPGRADE) + BODY + request(HOST, *UPGRADE) + BODY
    assert statuses(exchange(server, twice, answers=2)) == [200, 200]


def test_a_websocket_is_answered_as_if_it_were_none(server: HttpServer) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert statuses(exchange(server, asked)) == [200]


def test_there_is_one_host(server: HttpServer) -> None:
    assert statuses(exchange(server, request() + BODY)) == [400]
    assert statuses(exchange(server, request(HOST, HOST) + BODY)) == [400]
    assert statuses(exchange(server, request(HOST, HOST, version=b"1.0") + BODY)) == [400]
    assert statuses(exchange(server, request(version=b"1.0") + BODY)) == [200]


def test_a_long_head_in_one_packet_is_refused(server: HttpServer) -> None:
    asked = request(HOST, b"x: " + b"y" * 100_000)
    assert statuses(exchange(server, asked + BODY)) == [431]


def test_http_1_0_gets_no_chunks(server: HttpServer) -> None:
    streamed = BODY[:-1] + b',"stream":true}'
    said = exchange(server, request(version=b"1.0", body=streamed) + streamed)
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("encoding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_encoded_bodies(server: HttpServer, encoding: str, encode: type[bytes]) -> None:
    def post(content: bytes) -> httpx.Response:
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        return httpx.post(server.url + "/v1/completions", content=content, headers=headers, verify=TLS)

    padded = json.dumps({"prompt": "Hi", "max_tokens": 1, "user": "x" * 500}).encode() + b" " * 2_000_000
    assert post(encode(padded)).status_code == 200
    for broken in (BODY, encode(BODY)[:-6], b"", encode(BODY) + b"x"):
        refused = post(broken)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "content_encoding")
    bomb = encode(b'{"a":"' + b"x" * (40 << 20) + b'"}')
    assert len(bomb) < 100_000
    assert post(bomb).status_code == 413


def test_what_follows_an_encoded_body_is_not_kept() -> None:
    """zlib keeps it, and copies all of it with each piece."""
    pieces = [gzip.compress(BODY), *[bytes(1 << 20)] * 64]
    taken = 0

    async def receive() -> Message:
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": pieces[taken - 1], "more_body": taken < len(pieces)}

    async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "headers": [(b"content-encoding", b"gzip")]}
    with pytest.raises(ApiError, match="bytes follow the end"):
        asyncio.run(Decompress(read_all, ApiTable([]))(scope, receive, send))
    assert taken == 2


def test_other_encodings_are_refused(server: HttpServer) -> None:
    headers = {"content-encoding": "br", "content-type": "application/json"}
    refused = httpx.post(server.url + "/v1/completions", content=BODY, headers=headers, verify=TLS)
    assert refused.status_code == 415


def test_a_connection_is_kept_alive_for_longer_than_clients_pause(server: HttpServer) -> None:
    """uvicorn's own 5 s end when a client that reuses its connections may be sending."""
    with contextlib.closing(HTTPConnection(*address_of(server.url), timeout=30)) as connection:
        for pause_s in (6.0, 0.0):
            connection.request("GET", "/health/live")
            with connection.getresponse() as response:
                assert (response.status, response.read()) == (200, b'{"status":"ok"}')
            connection.auto_open = 0  # not another one
            time.sleep(pause_s)


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def test_the_health_port_answers_while_the_api_is_full() -> None:
    """The API is full of connections, and of descriptors; the port answers through a drain, too. It takes no keys and
    answers only probes."""
    health = f"http://127.0.0.1:{free_port()}"
    config: dict[str, Any] = {
        "max_num_queued_reqs": 1,
        "max_num_seqs": 1,
        "api_key": ("k",),
        "shutdown_timeout": 60.0,
        "max_idle_connections_per_address": 1 << 20,  # all are from one here
    }
    server = HttpServer(health_port=address_of(health)[1], **config)
    try:
        server.start_message()
        server.send(ready_message(server.tokenizer.vocabulary.size))
        assert within(30, lambda: httpx.get(health + "/health").status_code == 200)
        assert httpx.get(health + "/v1/models").status_code == 404
        assert httpx.get(server.url + "/v1/models").status_code == 401
        limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        few = (SPARE_DESCRIPTORS + 80, limits[1])
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, few)
        for connections in (60, 100):
            with contextlib.ExitStack() as stack:
                for _ in range(connections):
                    stack.enter_context(socket.create_connection(address_of(server.url), timeout=30))
                with contextlib.suppress(httpx.TransportError):
                    assert httpx.get(server.url + "/health").status_code == 200
                    assert connections == 60, "as many connections as descriptors"
                for path in ("/health", "/health/ready", "/health/live", "/metrics"):
                    assert httpx.get(health + path).status_code == 200
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
        with contextlib.ExitStack() as stack:
            for _ in range(SPARE_CONNECTIONS + 2):
                stack.enter_context(socket.create_connection(address_of(server.url), timeout=30))
            assert within(30, lambda: httpx.get(server.url + "/health").status_code == 503)
            assert httpx.get(health + "/health/ready").status_code == 200
        server.answer = silence
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.post, "/v1/completions", {"prompt": "Hi"}, headers={"x-api-key": "k"})
            assert within(30, lambda: bool(server.requests))
            server.terminate()
            assert within(30, lambda: httpx.get(health + "/health").json() == {"status": "draining"})
            echo(server, server.requests[0])
            assert asked.result().status_code == 200
        assert server.process.wait(30) == 0
    finally:
        server.close()
