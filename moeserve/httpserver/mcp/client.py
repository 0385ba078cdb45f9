"""A client of one MCP server over streamable HTTP, for the length of one request.

Source: Model Context Protocol, "Transports" and "Lifecycle", revisions 2025-03-26 to 2025-11-25. The MCP server's
answers are untrusted, so their bytes, their number and their time are bounded. Requests go only to the address that the
operator gave: redirects are not followed, and proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Final

import aiohttp
import orjson

from moeserve import __version__
from moeserve.httpserver.mcp.bodies import McpResult, McpTool
from moeserve.httpserver.mcp.servers import McpAddress
from moeserve.httpserver.transport.errors import ApiError

VERSION: Final = "2025-06-18"  # of the protocol, as this client asks for it
KNOWN_VERSIONS: Final = frozenset({"2025-03-26", "2025-06-18", "2025-11-25"})
CONNECT_S: Final = 5.0
LIST_S: Final = 30.0  # for a server to begin a session and list its tools
CALL_S: Final = 300.0
MAX_BYTES: Final = 4 << 20  # the most bytes of one answer, including other messages of its stream
MAX_PAGES: Final = 16
MAX_TOOLS: Final = 256
MAX_SAID_CHARS: Final = 300  # the most characters of a server's text in an error message
_SESSION_ID: Final = re.compile(r"[\x21-\x7e]{1,1024}")


class _SessionLost(Exception):
    """The server no longer knows the session."""


class McpClient:
    def __init__(self, name: str, address: McpAddress, session: str | None) -> None:
        """session: the value of `session` after an earlier request; None begins a new session."""
        self._name = name
        self._address = address
        self._version, _, self._id = (session or "").partition(" ")
        self._next = 0  # of the ids of messages
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> McpClient:
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    @property
    def session(self) -> str:
        """Returns the protocol's version and, if the server has given one, the session's id."""
        return f"{self._version} {self._id}".rstrip()

    async def tools(self) -> list[McpTool]:
        """Returns the server's tools, of all pages of its list. Raises ApiError if it cannot be reached or breaks the
        protocol."""
        found: list[McpTool] = []
        cursor: str | None = None
        async with self._deadline(LIST_S):
            for _ in range(MAX_PAGES):
                page = await self._asked("tools/list", {} if cursor is None else {"cursor": cursor})
                listed = page.get("tools")
                if not isinstance(listed, list):
                    raise self._broken("a list of tools has no tools")
                found += [self._tool(one) for one in listed]
                cursor = page.get("nextCursor")
                if not isinstance(cursor, str) or not cursor:
                    break
        if len(found) > MAX_TOOLS:
            cause = f"it has {len(found)} tools, and at most {MAX_TOOLS} are allowed"
            raise self._broken(cause, "have it offer fewer")
        return found

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> McpResult:
        """Calls a tool and returns its result. If the tool fails, the result has `is_error`. Raises ApiError if the
        call itself fails."""
        async with self._deadline(CALL_S):
            result = await self._asked("tools/call", {"name": tool, "arguments": dict(arguments)})
        content = result.get("content", [])
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise self._broken("the result of a call has no content")
        if not content and isinstance(result.get("structuredContent"), dict):
            text = orjson.dumps(result["structuredContent"]).decode()
            content = [{"type": "text", "text": text}]
        return {"session": self.session, "is_error": result.get("isError") is True, "content": content}

    def _deadline(self, seconds: float) -> _Deadline:
        return _Deadline(self._name, seconds)

    def _tool(self, given: Any) -> McpTool:
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            raise self._broken("a tool has no name")
        schema, description = given.get("inputSchema"), given.get("description")
        return {
            "name": given["name"],
            "description": description if isinstance(description, str) else "",
            "input_schema": schema if isinstance(schema, dict) else {"type": "object"},
        }

    # ------------------------------------------------------------ the protocol

    async def _asked(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the result of one request. Begins a session if there is none, or if the server has lost it."""
        if self._version:
            try:
                return await self._request(method, params)
            except _SessionLost:
                self._version = self._id = ""
        await self._begin()
        try:
            return await self._request(method, params)
        except _SessionLost:
            raise self._broken("it does not know the session that it has just begun") from None

    async def _begin(self) -> None:
        about = {"name": "moeserve", "version": __version__}
        params = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": about}
        result = await self._request("initialize", params)
        version = result.get("protocolVersion")
        if version not in KNOWN_VERSIONS:
            known = ", ".join(sorted(KNOWN_VERSIONS))
            raise self._broken(
                f"it speaks the protocol's version {str(version)[:40]!r}, and this server {known}"
            )
        self._version = version
        await self._post({"method": "notifications/initialized"})

    async def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        self._next += 1
        number = self._next
        answer = await self._post({"id": number, "method": method, "params": params}, number)
        if answer is None:
            raise self._broken("it answered a request as if it were a notification")
        if isinstance(error := answer.get("error"), dict):
            raise ApiError(
                502,
                f"the MCP server {self._name!r} refused: {str(error.get('message'))[:MAX_SAID_CHARS]}",
                code="mcp_error",
            )
        result = answer.get("result")
        if not isinstance(result, dict):
            raise self._broken("an answer has neither a result nor an error")
        return result

    async def _post(self, message: Mapping[str, Any], number: int | None = None) -> dict[str, Any] | None:
        """Sends a message. Returns the response to the request `number`; None for a notification."""
        own = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        headers = {**self._address.headers, **own}
        if self._version:
            headers["mcp-protocol-version"] = self._version
        if self._id:
            headers["mcp-session-id"] = self._id
        body = orjson.dumps({"jsonrpc": "2.0", **message})
        try:
            async with self._http.post(
                self._address.url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                if answer.status == 404 and self._id:
                    raise _SessionLost
                if answer.status not in (200, 202):
                    cause = f"it answered with HTTP status {answer.status}"
                    raise self._broken(cause, _remedy_for(answer.status))
                if (session := answer.headers.get("mcp-session-id")) is not None:
                    if not _SESSION_ID.fullmatch(session):
                        raise self._broken("its session's id has characters that no id may have")
                    self._id = session
                return None if number is None else await self._response(answer, number)
        except (aiohttp.ClientError, OSError) as error:
            message_text = f"the MCP server {self._name!r} cannot be reached: {error or type(error).__name__}"
            raise ApiError(502, message_text, code="mcp_unreachable") from error

    async def _response(self, answer: aiohttp.ClientResponse, number: int) -> dict[str, Any]:
        if answer.content_type == "text/event-stream":
            async for data in _events(self._bounded(answer)):
                if (found := self._response_in(data, number)) is not None:
                    return found
            raise self._broken("its stream ended before the answer")
        whole = b"".join([piece async for piece in self._bounded(answer)])
        if (found := self._response_in(whole, number)) is None:
            raise self._broken("its answer is to another request")
        return found

    def _response_in(self, data: bytes, number: int) -> dict[str, Any] | None:
        """Returns the message if it is the response; None if it is a request or notification of the server's."""
        try:
            found = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise self._broken("its answer is not JSON") from None
        is_response = isinstance(found, dict) and found.get("id") == number and "method" not in found
        return found if is_response else None

    async def _bounded(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        taken = 0
        async for piece in answer.content.iter_any():
            taken += len(piece)
            if taken > MAX_BYTES:
                raise self._broken(f"its answer has more than {MAX_BYTES >> 20} MiB", "ask it for less")
            yield piece

    def _broken(self, cause: str, remedy: str = "update that server") -> ApiError:
        return ApiError(
            502,
            f"the MCP server {self._name!r} cannot be used: {cause}; {remedy}, or leave it out of --mcp-servers",
            code="mcp_error",
        )


def _remedy_for(status: int) -> str:
    if status in (401, 403):
        return "correct its headers in --mcp-headers-file"
    if status >= 500:
        return "see its own log"
    if status < 400 or status == 404:  # redirects are not followed
        return "correct its address in --mcp-servers"
    return "update that server"


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the data of server-sent events. Source: WHATWG HTML, "Server-sent events"."""
    rest, data = b"", []
    async for piece in pieces:
        *lines, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []


class _Deadline:
    """A time limit whose end is an ApiError."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name = name
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as ended:
            message = f"the MCP server {self._name!r} did not answer within {self._seconds:g} s"
            raise ApiError(504, message, code="mcp_timeout") from ended
