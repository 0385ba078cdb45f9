"""A client that goes away, wherever its request is, frees every slot it held."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.completions import TEXT, completion, from_cache, is_empty, running, waiting
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

LONG_PROMPT = [100 + i % 3000 for i in range(2000)]
SHORT_PROMPT = [100, 200, 300]


@pytest.fixture(scope="module")
def slow_server(tiny_model: Path) -> Iterator[Server]:
    """Two requests at a time, two tokens a step: a long prompt and a queue last long enough to be left."""
    with running_server(tiny_model, "--max-num-seqs", "2", "--max-num-batched-tokens", "2") as running:
        yield running


@contextmanager
def client_that_leaves(
    server: Server, prompt: list[int], max_tokens: int, stream: bool
) -> Iterator[socket.socket]:
    """Has sent its request when the `with` begins; at its end the connection is closed, unread."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    content = json.dumps(body).encode()
    host, port = server.base_url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield connection


def generated(server: Server) -> float:
    return server.metrics()["moeserve:generation_tokens_total"]


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
def test_leaving_mid_prefill(slow_server: Server, stream: bool) -> None:
    """On a busy machine a prompt may have been read before its client has left: then another client tries."""
    for _ in range(10):
        before = generated(slow_server)
        with client_that_leaves(slow_server, LONG_PROMPT, 16, stream):
            assert within(30, lambda: slow_server.metrics()["moeserve:kv_cache_usage_perc"] > 0)
        assert within(30, lambda: is_empty(slow_server))
        if generated(slow_server) == before:
            return
    pytest.fail("the prompt is always read to its end")


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
def test_leaving_mid_decode(slow_server: Server, stream: bool) -> None:
    before = generated(slow_server)
    with client_that_leaves(slow_server, SHORT_PROMPT, 1900, stream) as connection:
        assert within(30, lambda: generated(slow_server) > before + 10)
        if stream:
            received = b""
            while b"data: " not in received:
                received += connection.recv(65536) or pytest.fail("closed")
    assert within(30, lambda: is_empty(slow_server))
    assert generated(slow_server) < before + 1900, "the answer was finished before its client could leave"


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
def test_leaving_the_queue_and_those_ahead_of_it(slow_server: Server, stream: bool) -> None:
    with (
        client_that_leaves(slow_server, SHORT_PROMPT, 1900, stream),
        client_that_leaves(slow_server, SHORT_PROMPT, 1900, stream),
    ):
        assert within(30, lambda: running(slow_server) == 2)
        with client_that_leaves(slow_server, SHORT_PROMPT, 16, stream):
            assert within(30, lambda: waiting(slow_server) == 1)
        assert within(30, lambda: waiting(slow_server) == 0)
        assert running(slow_server) == 2
    assert within(30, lambda: is_empty(slow_server))


def test_the_others_do_not_notice(slow_server: Server) -> None:
    expected = from_cache(slow_server, prompt=TEXT, max_tokens=32, logprobs=5)
    with client_that_leaves(slow_server, LONG_PROMPT, 16, stream=False):
        assert within(30, lambda: running(slow_server) == 1)
    assert completion(slow_server, prompt=TEXT, max_tokens=32, logprobs=5) == expected
    assert within(30, lambda: is_empty(slow_server))
