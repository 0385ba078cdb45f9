"""A small MCP server over streamable HTTP, as its specification has it: sessions, JSON or streams, pages of tools.

Source: Model Context Protocol, "Transports", revision 2025-06-18.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

VERSION = "2025-06-18"
ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "inputSchema": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}
FAIL = {"name": "fail", "description": "Fails.", "inputSchema": {"type": "object"}}


@dataclass
class McpServer:
    """The fields may be changed while it runs."""

    streams: bool = False  # answers as server-sent events, with messages of its own before them
    version: str = VERSION  # that it answers with
    status: int | None = None  # of every answer
    location: str = ""  # of a redirect, with `status`
    raw: bytes | None = None  # every answer's body
    stall: bool = False  # no answer at all
    pad: int = 0  # characters in a result
    port: int = 0
    sessions: set[str] = field(default_factory=set)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # tool and arguments
    headers: list[dict[str, str]] = field(default_factory=list)  # of each request, in lower case
    begun: int = 0  # sessions

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    async def post(self, request: web.Request) -> web.StreamResponse:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.stall:
            await asyncio.sleep(3600)
        if self.status is not None:
            return web.Response(
                status=self.status, headers={"location": self.location} if self.location else {}
            )
        if self.raw is not None:
            return web.Response(body=self.raw, content_type="application/json")
        message = await request.json()
        assert message["jsonrpc"] == "2.0"
        assert {"application/json", "text/event-stream"} <= set(request.headers["accept"].split(", "))
        if message["method"] == "initialize":
            self.begun += 1
            session = f"session-{self.begun}"
            self.sessions.add(session)
            about = {"name": "test", "version": "1"}
            result = {"protocolVersion": self.version, "capabilities": {"tools": {}}, "serverInfo": about}
            return await self._answer(request, message, result, {"mcp-session-id": session})
        if request.headers.get("mcp-session-id") not in self.sessions:
            return web.Response(status=404)
        assert request.headers["mcp-protocol-version"] == self.version
        if "id" not in message:
            assert message["method"] == "notifications/initialized"
            return web.Response(status=202)
        if message["method"] == "tools/list":
            page: dict[str, Any] = {"tools": [FAIL]}
            if "cursor" not in message["params"]:
                page = {"tools": [ADD], "nextCursor": "2"}
            return await self._answer(request, message, page)
        assert message["method"] == "tools/call"
        return await self._answer(request, message, self._called(message["params"]))

    def _called(self, params: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((params["name"], params["arguments"]))
        if params["name"] == "add":
            text = str(params["arguments"]["a"] + params["arguments"]["b"]) + "x" * self.pad
            return {"content": [{"type": "text", "text": text}], "isError": False}
        return {"content": [{"type": "text", "text": "out of paper"}], "isError": True}

    async def _answer(
        self,
        request: web.Request,
        message: dict[str, Any],
        result: Any,
        headers: dict[str, str] | None = None,
    ) -> web.StreamResponse:
        body = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        if not self.streams:
            return web.json_response(body, headers=headers)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", **(headers or {})})
        await answer.prepare(request)
        note = {
            "jsonrpc": "2.0",
            "method": "notifications/message",
            "params": {"level": "info", "data": "on it"},
        }
        ping = {"jsonrpc": "2.0", "id": message["id"], "method": "ping"}
        for one in (note, ping, body):
            # Over several lines, and in two pieces: a reader must put both together.
            lines = "".join(f"data: {line}\r\n" for line in json.dumps(one, indent=1).split("\n"))
            text = f": a comment\r\nevent: message\r\n{lines}\r\n".encode()
            await answer.write(text[:20])
            await answer.write(text[20:])
        return answer


@contextmanager
def running_mcp_server(**fields: Any) -> Iterator[McpServer]:
    server = McpServer(**fields)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start() -> web.AppRunner:
        application = web.Application()
        application.router.add_post("/mcp", server.post)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]
        started.set()
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
