"""What one connection's bytes may cost: requests behind each other, bodies behind a refusal, framing without end."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from moeserve.httpserver.transport import sliced_connection
from moeserve.httpserver.transport.connection import (
    MAX_FIELDS,
    MAX_FRAMING_BYTES,
    MAX_HEAD_BYTES,
    MAX_TARGET_BYTES,
    BoundedHttpProtocol,
)
from moeserve.httpserver.transport.held_input import BLANKS_SLICE
from moeserve.httpserver.transport.sliced_connection import HELD_BYTES
from moeserve.httpserver.transport.turns import Turns
from tests.support.clients.raw_connection import all_that_comes, reads_all

GET = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Served:
    """A server of one application."""

    def __init__(self, address: tuple[str, int], state: ServerState) -> None:
        self.address = address
        self.state = state

    @property
    def connection(self) -> BoundedHttpProtocol:
        (one,) = self.state.connections
        assert isinstance(one, BoundedHttpProtocol)
        return one

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address)

    async def said_to(self, *packets: bytes) -> bytes:
        reader, writer = await self.connect()
        for packet in packets:
            writer.write(packet)
            await asyncio.sleep(0.02)
        said = await all_that_comes(reader)
        writer.close()
        return said


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[Served]:
    config = uvicorn.Config(app, http=BoundedHttpProtocol, lifespan="off", log_config=None)
    config.load()
    state, turns = ServerState(), Turns(is_busy=lambda: False)

    def protocol() -> BoundedHttpProtocol:
        return BoundedHttpProtocol(config=config, server_state=state, app_state={}, turns=turns)

    async with (
        asyncio.timeout(60),
        await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0) as server,
    ):
        yield Served(server.sockets[0].getsockname()[:2], state)


async def say(send: Send, status: int, body: bytes) -> None:
    length = b"%d" % len(body)
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
    """Before it has read the body."""
    await say(send, 401, b"no")


def statuses(said: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_requests_behind_each_other_are_parsed_one_at_a_time() -> None:
    begun: list[bytes] = []
    asked = asyncio.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["query_string"])
        await asked.wait()
        await say(send, 200, scope["query_string"])

    async def play() -> bytes:
        async with serving(answer) as server:
            reader, writer = await server.connect()
            requests = [b"GET /x?%03d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(1000)]
            writer.write(b"".join(requests))
            await until(lambda: bool(begun) and len(server.connection._held) > 0)
            # A head is parsed when the answer before it has gone out.
            least = min(HELD_BYTES, len(b"".join(requests[1:])))
            await until(lambda: len(server.connection._held) >= least)
            await asyncio.sleep(0.1)
            assert begun == [b"000"]
            assert len(server.connection._held) >= least
            assert not server.connection.pipeline
            asked.set()
            await until(lambda: len(begun) == 1000)
            writer.write(b"GET /x?end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return await all_that_comes(reader)

    said = asyncio.run(play())
    assert statuses(said) == [200] * 1001
    assert [part[-3:] for part in said.split(b"HTTP/1.1 ")[1:-1]] == [b"%03d" % i for i in range(1000)]


def test_a_turn_of_the_event_loop_is_short_whatever_comes() -> None:
    """A read brings 256 KiB: 9,000 requests, 40,000 chunks, 130,000 blank lines."""

    async def longest(*sent: bytes) -> float:
        """The longest CPU time of the thread between two turns of the loop, in seconds."""
        longest, app = 0.0, refuses
        async with serving(app) as server:
            connections = [await server.connect() for _ in range(5)]
            await asyncio.sleep(0.1)
            for _, writer in connections:
                for data in sent:
                    writer.write(data)
            before = time.thread_time()
            end = before + 0.25
            while before < end:
                await asyncio.sleep(0)
                now = time.thread_time()
                longest, before = max(longest, now - before), now
            for _, writer in connections:
                writer.transport.abort()
        return longest

    for sent in (
        [GET * 20_000],
        [GET.replace(b"GET", b"NONE") * 20_000],
        [GET, b"\r\n" * 500_000],
        [CHUNKED, b"1\r\nx\r\n" * 100_000],
        [POST + b"Content-Length: 100000000000\r\n\r\n", bytes(4 << 20)],
        [POST, b"a: b\r\n" * 100_000],
    ):
        assert asyncio.run(longest(*sent)) < 0.1, sent[0][:60]


def test_a_refusal_before_the_bodys_end_is_the_connections_last() -> None:
    async def play() -> list[bytes]:
        async with serving(refuses) as server:
            return [
                await server.said_to(POST + b"Content-Length: 50\r\n\r\n", b"x" * 50),
                await server.said_to(CHUNKED, b"2\r\nxx\r\n0\r\n\r\n"),
                await server.said_to(POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"),
            ]

    for said in asyncio.run(asyncio.wait_for(play(), 60)):
        assert statuses(said) == [401]
        assert b"connection: close" in said
        assert said.endswith(b"no")


def test_a_body_that_is_there_is_skipped() -> None:
    async def play() -> bytes:
        async with serving(refuses) as server:
            request = POST + b"Content-Length: 5\r\n\r\nxxxxx"
            last = request.replace(b"Host", b"Connection: close\r\nHost")
            return await server.said_to(request * 3 + last)

    said = asyncio.run(play())
    assert statuses(said) == [401] * 4
    assert said.count(b"connection: close") == 1


@pytest.mark.parametrize(
    ("head", "then"),
    [
        (POST + b"Content-Length: 1000000000000\r\n\r\n", bytes(1 << 16)),
        (CHUNKED, b"10000\r\n" + bytes(1 << 16) + b"\r\n"),
    ],
    ids=["length", "chunks"],
)
def test_what_comes_behind_a_refusal_is_dropped_for_a_while(
    head: bytes, then: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced_connection, "LINGER_BYTES", 4 << 20)

    async def play() -> tuple[bytes, int]:
        async with serving(refuses) as server:
            reader, writer = await server.connect()
            answer = asyncio.create_task(all_that_comes(reader))
            writer.write(head)
            sent = 0
            try:
                while True:
                    writer.write(then)
                    await writer.drain()
                    sent += len(then)
                    assert sent < 1 << 30
            except ConnectionError:
                pass
            return await answer, sent

    said, sent = asyncio.run(play())
    assert statuses(said) == [401]
    assert sent > 1 << 20  # so that a client that writes first and then reads gets its answer


def test_a_client_that_sends_nothing_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_connection, "LINGER_S", 0.2)

    async def play() -> None:
        async with serving(refuses) as server:
            reader, writer = await server.connect()
            writer.write(CHUNKED)
            assert statuses(await all_that_comes(reader)) == [401]  # our direction is closed
            assert server.state.connections
            await until(lambda: not server.state.connections)
            writer.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("packets", "status"),
    [
        ([CHUNKED, b"1\r\nx\r\n" * (MAX_FRAMING_BYTES // 4)], 413),
        (
            [CHUNKED, b"1;" + b"a" * 500 + b"\r\nx\r\n"] * 1 + [(b"1;" + b"a" * 500 + b"\r\nx\r\n") * 3000],
            413,
        ),
        ([GET[:-2] + b"a: b\r\n" * MAX_FIELDS + b"\r\n"], 431),
        ([CHUNKED, b"0\r\n" + b"a: b\r\n" * (MAX_FIELDS + 2)], 431),
        ([GET[:-2] + b"a: " + b"b" * MAX_HEAD_BYTES], 431),
        ([GET.replace(b"/x", b"/" + b"x" * MAX_TARGET_BYTES)], 414),
        ([POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n"], 501),
        ([POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"], 501),
        ([GET, b"\r\n" * MAX_HEAD_BYTES], 431),
        ([b"GET /x HTTP/1.1\nHost: x\n\n"], 400),
        ([b"GET http://:80/ HTTP/1.1\r\nHost: x\r\n\r\n"], 400),
        ([b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n"], 400),
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], 400),  # TLS
    ],
    ids=[
        *["tiny chunks", "chunk extensions", "fields", "trailers", "head", "path"],
        *["coding", "codings", "blank lines", "bare line ends", "no host", "no path", "TLS"],
    ],
)
def test_framing_has_bounds(packets: list[bytes], status: int) -> None:
    async def play() -> bytes:
        async with serving(reads_all) as server:
            return await server.said_to(*packets)

    said = asyncio.run(play())
    assert statuses(said)[-1] == status
    body = said.rpartition(b"\r\n\r\n")[2]
    assert json.loads(body)["error"]["message"]
    assert b"content-type: application/json" in said


def test_a_request_behind_blank_lines_is_answered() -> None:
    async def play(size: int) -> bytes:
        async with serving(reads_all) as server:
            return await server.said_to(
                b"\r\n" * (size // 2) + GET.replace(b"Host", b"Connection: close\r\nHost")
            )

    for size in (2, BLANKS_SLICE - 2, BLANKS_SLICE, BLANKS_SLICE + 2, 5 * BLANKS_SLICE):
        assert statuses(asyncio.run(play(size))) == [200]


def test_many_chunks_of_a_usual_size_are_a_body() -> None:
    async def play() -> bytes:
        async with serving(reads_all) as server:
            last = CHUNKED.replace(b"Host", b"Connection: close\r\nHost")
            return await server.said_to(
                last,
                b"40\r\n" + b"x" * 64 + b"\r\n",
                (b"10\r\n" + b"x" * 16 + b"\r\n") * 90_000,
                b"0\r\n\r\n",
            )

    assert statuses(asyncio.run(play())) == [200]


def test_trailers_are_no_headers() -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def notes(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.append(list(scope["headers"]))
        await say(send, 200, b"")

    async def play() -> None:
        async with serving(notes) as server:
            reader, writer = await server.connect()
            writer.write(CHUNKED + b"1\r\nx\r\n")
            await asyncio.sleep(0.05)
            writer.write(b"0\r\nauthorization: Bearer k\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            writer.close()

    asyncio.run(play())
    assert [name for name, _ in seen[0]] == [b"host", b"transfer-encoding"]


@pytest.mark.parametrize(
    "behind", [POST + b"Content-Length: 5000\r\n\r\n{", GET * 3, b""], ids=["part", "whole", "none"]
)
def test_a_client_that_leaves_is_noticed_whatever_it_has_sent(behind: bytes) -> None:
    """Before, its request went on to the end, and the one behind it was an error of the server's."""
    left: list[str] = []
    begun = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while (message := await receive())["type"] != "http.disconnect":
            pass
        left.append(message["type"])

    async def play() -> None:
        async with serving(waits) as server:
            _, writer = await server.connect()
            writer.write(GET + behind)
            await begun.wait()
            await asyncio.sleep(0.05)
            writer.close()
            await until(lambda: bool(left) and not server.state.connections)
            await until(lambda: not server.state.tasks)

    asyncio.run(play())
    assert left == ["http.disconnect"]


def test_a_request_that_waits_is_answered_when_the_server_ends() -> None:
    async def play() -> bytes:
        async with serving(reads_all) as server:
            reader, writer = await server.connect()
            writer.write(GET)
            await until(lambda: bool(server.state.connections))
            connection = server.connection
            await until(lambda: connection._had_request or len(connection._held) > 0)
            connection.shutdown()
            said = await all_that_comes(reader)
            writer.close()
            return said

    said = asyncio.run(play())
    assert statuses(said) == [200]
