"""Slices of what a connection brings, before a parser as it is: none goes beyond a message, nothing is lost."""

from __future__ import annotations

import random

import httptools
import pytest

from moeserve.httpserver.transport.held_input import (
    BLANKS_SLICE,
    BODY_SLICE,
    CHUNKS_SLICE,
    HEAD_SLICE,
    HeldInput,
)

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def head(rng: random.Random, framing: bytes) -> bytes:
    fields = b"".join(b"x-%d: %s\r\n" % (i, b"y" * rng.randrange(300)) for i in range(rng.randrange(9)))
    return b"POST /x HTTP/1.1\r\nHost: x\r\n" + fields + framing + b"\r\n\r\n"


def text(rng: random.Random) -> bytes:
    """Bodies may hold what ends a head."""
    return b"".join(
        rng.choice([b"a", b"\r\n\r\n", b"\r", b"0\r\n\r\n", b"z" * 1000]) for _ in range(rng.randrange(1, 90))
    )


def message(rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return GET
    if kind == 1:
        body = text(rng) * rng.choice([1, 1, 50])
        return head(rng, b"Content-Length: %d" % len(body)) + body
    if kind == 2:
        return b"\r\n" * rng.randrange(5) + GET
    chunks = b"".join(
        b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in (text(rng) for _ in range(rng.randrange(5)))
    )
    trailers = b"".join(b"t-%d: u\r\n" % i for i in range(rng.randrange(3)))
    return head(rng, b"Transfer-Encoding: chunked") + chunks + b"0\r\n" + trailers + b"\r\n"


class Reader:
    """Feeds a parser slice by slice."""

    def __init__(self) -> None:
        self.held = HeldInput()
        self.parser = httptools.HttpRequestParser(self)
        self.given = 0  # bytes
        self.skipped = 0
        self.messages = 0
        self.is_arriving = False
        self._begun_in_slice = self._ended_in_slice = 0
        self._headers: list[tuple[bytes, bytes]] = []

    def read(self, data: bytes) -> None:
        self.held.add(data)
        while self.held:
            if not self.is_arriving:
                self.skipped += self.held.skip_blank_lines()
                if not self.held:
                    return
            self._begun_in_slice = self._ended_in_slice = 0
            data = self.held.next_slice()
            assert 0 < len(data) <= max(HEAD_SLICE, CHUNKS_SLICE, BODY_SLICE)
            self.given += len(data)
            self.parser.feed_data(data)
            assert self._begun_in_slice <= 1
            assert self._ended_in_slice <= 1
            assert not (self._ended_in_slice and self.is_arriving), (
                "a request began behind another in one slice"
            )

    def on_message_begin(self) -> None:
        self._begun_in_slice += 1
        self.is_arriving, self._headers = True, []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        headers = dict(self._headers)
        is_chunked = b"transfer-encoding" in headers
        self.held.begin_body(None if is_chunked else int(headers.get(b"content-length", 0)))

    def on_body(self, body: bytes) -> None:
        self.held.body_came(len(body))

    def on_message_complete(self) -> None:
        self._ended_in_slice += 1
        self.messages += 1
        self.is_arriving = False
        self.held.end_message()


@pytest.mark.parametrize("seed", range(15))
def test_each_slice_is_of_one_message(seed: int) -> None:
    rng = random.Random(seed)
    messages = [message(rng) for _ in range(30)]
    stream, at, reader = b"".join(messages), 0, Reader()
    while at < len(stream):
        size = rng.choice([1, 2, 3, 5, 100, 4096, 1 << 18])
        reader.read(stream[at : at + size])
        at += size
    assert reader.messages == len(messages)
    assert reader.given + reader.skipped == len(stream)


def test_slices_of_what_has_no_end_are_small() -> None:
    for endless in (b"a: b\r\n", b"a"):
        held = HeldInput()
        held.add(b"GET / HTTP/1.1\r\n" + endless * (1 << 18))
        assert len(held.next_slice()) == HEAD_SLICE
    held = HeldInput()
    held.begin_body(None)
    held.add(b"1\r\nx\r\n" * (1 << 15))
    assert len(held.next_slice()) == CHUNKS_SLICE
    held.begin_body(1 << 30)
    assert len(held.next_slice()) == BODY_SLICE


def test_blank_lines_are_skipped_in_slices() -> None:
    held = HeldInput()
    held.add(b"\r\n" * (1 << 17) + GET)
    skipped = list(iter(held.skip_blank_lines, 0))
    assert set(skipped) == {BLANKS_SLICE}
    assert sum(skipped) == 1 << 18
    assert held.next_slice() == GET
    assert not held
