"""More connections than there is room for."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from moeserve.httpserver.transport import connection, sliced_connection
from moeserve.httpserver.transport.connection import BoundedHttpProtocol
from moeserve.httpserver.transport.idle_connections import IdleConnections, network_of
from moeserve.messages.refusal import Refusal
from tests.support.clients.raw_connection import all_that_comes, reads_all


def test_a_connection_too_many_gets_json() -> None:
    async def ask() -> bytes:
        config = uvicorn.Config(
            reads_all, http=BoundedHttpProtocol, lifespan="off", log_config=None, limit_concurrency=2
        )
        config.load()
        state = ServerState()

        def protocol() -> BoundedHttpProtocol:
            return BoundedHttpProtocol(config=config, server_state=state, app_state={})

        server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        async with server:
            address = server.sockets[0].getsockname()
            _, idle = await asyncio.open_connection(*address)
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await all_that_comes(reader)
            idle.close()
            writer.close()
            return answer

    head, _, body = asyncio.run(ask()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"content-type: application/json" in head
    assert b"retry-after: " in head
    assert json.loads(body)["error"]["code"] == "overloaded"


def test_connections_without_a_request_have_a_bound_for_each_address() -> None:
    """Those of one client displace each other, not another's, and not one whose request is being answered."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asked.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    begun, asked = asyncio.Event(), asyncio.Event()
    request = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"

    async def play() -> None:
        config = uvicorn.Config(answer, lifespan="off", log_config=None)
        config.load()
        state, idle = ServerState(), IdleConnections(2)

        def protocol() -> BoundedHttpProtocol:
            return BoundedHttpProtocol(config=config, server_state=state, app_state={}, idle=idle)

        async def waiting(count: int) -> None:
            while sum(map(len, idle._waiting.values())) != count:
                await asyncio.sleep(0.001)

        async with (
            asyncio.timeout(60),
            await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0) as server,
        ):
            address = server.sockets[0].getsockname()
            reader, busy = await asyncio.open_connection(*address)
            busy.write(request)
            await begun.wait()
            other_reader, other = await asyncio.open_connection(*address, local_addr=("127.0.0.2", 0))
            await waiting(1)
            silent = []
            for count in (2, 3, 3, 3):
                silent.append(await asyncio.open_connection(*address))
                await waiting(count)
            for old, _ in silent[:2]:
                assert await all_that_comes(old) == b""
            asked.set()
            other.write(request)
            assert (await other_reader.readline()).startswith(b"HTTP/1.1 200")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            # Answered and kept alive, `busy` awaits a request too: the oldest of the others makes room.
            assert await all_that_comes(silent[2][0]) == b""
            for writer in (busy, other, *(writer for _, writer in silent)):
                writer.close()
            await waiting(0)

    asyncio.run(play())


def test_where_connections_are_full_those_kept_alive_make_room() -> None:
    """The one that has waited longest first; not one whose request is being answered, and not one that has had none."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            begun.set()
            await asked.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return (await reader.readuntil(b"\r\n\r\n")).split()[1]

    begun, asked = asyncio.Event(), asyncio.Event()

    async def play() -> None:
        config = uvicorn.Config(answer, lifespan="off", log_config=None, limit_concurrency=5)
        config.load()
        state, idle = ServerState(), IdleConnections(100)

        def protocol() -> BoundedHttpProtocol:
            return BoundedHttpProtocol(config=config, server_state=state, app_state={}, idle=idle)

        async with (
            asyncio.timeout(60),
            await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0) as server,
        ):
            address = server.sockets[0].getsockname()
            open_connection = partial(asyncio.open_connection, *address)
            busy_reader, busy = await open_connection()
            busy.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            await begun.wait()
            silent_reader, silent = await open_connection()
            kept = [await open_connection() for _ in range(2)]
            for reader, writer in (kept[0], kept[1], kept[0]):
                assert await status(reader, writer) == b"200"
            newer = [await open_connection()]
            assert await status(*newer[0]) == b"200"
            assert await all_that_comes(kept[1][0]) == b"", "kept[0] has been of use since"
            newer.append(await open_connection())
            assert await status(*newer[1]) == b"200"
            assert await all_that_comes(kept[0][0]) == b""
            for _, writer in newer:
                writer.write(b"GET /slow HTTP/1.1\r\n")
            while idle._kept_alive:
                await asyncio.sleep(0.001)
            last = await open_connection()
            assert await status(*last) == b"503", "all others are at work, or new"
            asked.set()
            assert (await busy_reader.readline()).startswith(b"HTTP/1.1 200")
            assert await status(silent_reader, silent) == b"200"
            for _, writer in (*kept, *newer, last, (busy_reader, busy), (silent_reader, silent)):
                writer.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:0:0:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%lo", "fe80::2", True),
    ],
)
def test_addresses_of_one_client(one: str, other: str, are_one: bool) -> None:
    assert (network_of(one) == network_of(other)) is are_one


def test_a_head_and_a_body_that_come_too_slowly_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is silent from its start is no request."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connection, "BODY_INTERVAL_S", 0.2)
    counted: list[Refusal] = []

    async def play(begun: bytes) -> None:
        config = uvicorn.Config(reads_all, http=BoundedHttpProtocol, lifespan="off", log_config=None)
        config.load()
        state = ServerState()

        def protocol() -> BoundedHttpProtocol:
            return BoundedHttpProtocol(
                config=config, server_state=state, app_state={}, count_refusal=counted.append
            )

        server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(begun)
            await all_that_comes(reader)
            writer.close()

    for begun in (b"", b"GET /heal", b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"):
        asyncio.run(play(begun))
    assert counted == [Refusal.TIMEOUT, Refusal.TIMEOUT]


@pytest.mark.parametrize(
    ("first", "then", "last"),
    [
        (b"", b"GET /" + b"x" * 150 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b""),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"1\r\n \r\n" * 30,
            b"0\r\n\r\n",
        ),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", b"x" * 150, b""),  # refused: what still comes is dropped
    ],
)
def test_a_request_that_comes_byte_by_byte_is_read_now_and_then(
    first: bytes, then: bytes, last: bytes
) -> None:
    """A read for each byte of 80 connections took half a core, while a stream was answered."""
    reads = 0

    class Counting(BoundedHttpProtocol):
        def data_received(self, data: bytes) -> None:
            nonlocal reads
            reads += 1
            super().data_received(data)

    async def ask() -> tuple[bytes, float]:
        config = uvicorn.Config(reads_all, lifespan="off", log_config=None)
        config.load()
        state, loop = ServerState(), asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Counting(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            start = loop.time()
            writer.write(first)
            for byte in then:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.002)
            writer.write(last)
            took = loop.time() - start
            answer = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            return answer, took

    answer, took = asyncio.run(ask())
    assert answer.startswith(b"HTTP/1.1 400 " if b"Host :" in first else b"HTTP/1.1 200 ")
    assert reads <= 12 + took / sliced_connection.SMALL_READ_S


def test_what_comes_byte_by_byte_beside_an_answer_is_read_now_and_then() -> None:
    reads, begun = 0, asyncio.Event()

    class Counting(BoundedHttpProtocol):
        def data_received(self, data: bytes) -> None:
            nonlocal reads
            reads += 1
            super().data_received(data)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.sleep(60)

    async def ask() -> float:
        config = uvicorn.Config(answer, lifespan="off", log_config=None)
        config.load()
        state, loop = ServerState(), asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Counting(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            start = loop.time()
            writer.write(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
            await begun.wait()
            for byte in b"GET /" + b"x" * 150:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.002)
            took = loop.time() - start
            writer.close()
            return took

    took = asyncio.run(ask())
    assert 8 < reads <= 14 + took / sliced_connection.SMALL_READ_S
