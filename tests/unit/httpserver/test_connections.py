"""More connections than there is room for."""

from __future__ import annotations

import asyncio
import json

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from moeserve.httpserver.transport.connection import BoundedHttpProtocol
from moeserve.httpserver.transport.idle_connections import IdleConnections, network_of
from tests.unit.httpserver.raw_connection import all_that_comes, reads_all


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
            asyncio.timeout(30),
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
