"""HTTP as clients of all kinds speak it: upgrades that are ignored, one Host, HTTP/1.0, long heads, encoded bodies."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import zlib

import httpx
import pytest

from tests.support.http_harness import TLS, HttpServer

BODY = b'{"prompt":"Hi","max_tokens":1}'
HOST = b"Host: localhost"
UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__")


def request(*headers: bytes, version: bytes = b"1.1", body: bytes = BODY) -> bytes:
    length = b"Content-Length: %d" % len(body)
    lines = [b"POST /v1/completions HTTP/" + version, b"Content-Type: application/json", length, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def exchange(server: HttpServer, *packets: bytes) -> bytes:
    """What the server says to the packets until it closes or has nothing more to say."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        for packet in packets[:-1]:
            connection.sendall(packet)
            connection.settimeout(0.15)
            with contextlib.suppress(TimeoutError):
                assert not connection.recv(1), "an answer before the request's end"
        connection.sendall(packets[-1])
        connection.settimeout(1.0)
        said = b""
        try:
            while more := connection.recv(1 << 16):
                said += more
        except TimeoutError:
            pass
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
    assert statuses(exchange(server, request(HOST, *UPGRADE) + BODY + request(HOST, *UPGRADE) + BODY)) == [
        200,
        200,
    ]


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
    for broken in (BODY, encode(BODY)[:-6], b""):
        refused = post(broken)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "content_encoding")
    bomb = encode(b'{"a":"' + b"x" * (40 << 20) + b'"}')
    assert len(bomb) < 100_000
    assert post(bomb).status_code == 413


def test_other_encodings_are_refused(server: HttpServer) -> None:
    headers = {"content-encoding": "br", "content-type": "application/json"}
    refused = httpx.post(server.url + "/v1/completions", content=BODY, headers=headers, verify=TLS)
    assert refused.status_code == 415
