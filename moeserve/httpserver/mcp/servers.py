"""The MCP servers that the operator has named with --mcp-servers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from moeserve.errors import ConfigError
from moeserve.httpserver.mcp.headers import read_headers
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.refusal import Refusal

MAX_SERVERS: Final = 32
MAX_AT_ONCE: Final = 32  # requests to all servers together
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


class McpAddress(NamedTuple):
    url: str
    headers: Mapping[str, str]


class McpServers:
    def __init__(self, texts: Iterable[str], headers_file: str | None = None) -> None:
        """texts: name=URL. headers_file: JSON, for each name an object of headers. Raises ConfigError."""
        self.urls: dict[str, str] = {}
        self._running = 0
        for text in texts:
            name, _, url = text.partition("=")
            if not _NAME.fullmatch(name) or not _is_address(url):
                raise ConfigError(
                    f"--mcp-servers: {text[:200]!r} is not of the form name=URL, such as "
                    "files=http://127.0.0.1:8931/mcp; a name has letters, digits, _ and -"
                )
            if name in self.urls:
                raise ConfigError(f"--mcp-servers: the name {name!r} is given twice; choose another")
            self.urls[name] = url
        if len(self.urls) > MAX_SERVERS:
            raise ConfigError(f"--mcp-servers: {len(self.urls)} servers; leave all but {MAX_SERVERS} out")
        self._headers = read_headers(headers_file, self.urls)

    @contextmanager
    def request_to(self, name: str) -> Iterator[McpAddress]:
        """Yields the server's address and headers for one request. Raises ApiError: 404 for a name that the
        operator has not given, 503 if too many requests run."""
        if name not in self.urls:
            named = ", ".join(map(repr, self.urls)) or "none"
            message = f"there is no MCP server {name[:80]!r}; --mcp-servers names {named}"
            raise ApiError(404, message, code="mcp_server_not_found")
        if self._running >= MAX_AT_ONCE:
            message = f"{MAX_AT_ONCE} requests to MCP servers run, as many as may; try again later"
            raise ApiError(503, message, code="overloaded", refusal=Refusal.QUOTA)
        self._running += 1
        try:
            yield McpAddress(self.urls[name], self._headers.get(name, {}))
        finally:
            self._running -= 1


def _is_address(url: str) -> bool:
    """Returns whether the text is an HTTP address without a user name and password, which the list of processes would
    show to others."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.username is None
            and not parts.fragment
            and url.isprintable()
            and " " not in url
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        return False
