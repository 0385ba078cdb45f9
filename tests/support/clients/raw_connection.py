"""An application behind a connection, and what a client reads of it byte by byte."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Receive, Scope, Send


async def reads_all(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def all_that_comes(reader: asyncio.StreamReader) -> bytes:
    """Also before a reset, which a server's end is while we still send."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            answer += part
    return answer
