"""The HTTP headers that the operator has this server send to MCP servers (--mcp-headers-file): tokens, most often.

They are in a file, because a flag's value is visible in the list of processes. No answer, log line or error message
contains their values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from moeserve.errors import ConfigError

MAX_FILE_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, section 5.6.2
_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?")
# Headers that the protocol or HTTP sets for each request.
_RESERVED: Final = frozenset(
    {
        *("accept", "connection", "content-length", "content-type", "host", "transfer-encoding", "upgrade"),
        *("mcp-session-id", "mcp-protocol-version"),
    }
)


def read_headers(path: str | None, servers: Collection[str]) -> Mapping[str, Mapping[str, str]]:
    """Returns the headers by the servers' names. Raises ConfigError if the file cannot be read, has another form, or
    names a server that is not one of `servers`."""
    if path is None:
        return {}
    found = _read(Path(path))
    for server, headers in found.items():
        if server not in servers:
            named = ", ".join(map(repr, servers)) or "none"
            raise ConfigError(
                f"--mcp-headers-file: {path}: {server!r} is not a server of --mcp-servers, which names {named}; add "
                "it there, or leave it out here"
            )
        if not isinstance(headers, dict):
            raise ConfigError(f"--mcp-headers-file: {path}: {server!r} must have a JSON object of headers")
        for name, value in headers.items():
            _check(path, server, name, value)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_FILE_BYTES))
    except OSError as error:
        raise ConfigError(
            f"--mcp-headers-file: {path} cannot be read: {error.strerror or error}; name a readable file"
        ) from error
    except (ValueError, RecursionError):
        raise ConfigError(
            f"--mcp-headers-file: {path} is not JSON; write an object of servers"
        ) from None  # the cause would quote the file
    if not isinstance(found, dict):
        raise ConfigError(
            f"--mcp-headers-file: {path} must be a JSON object of servers, each with an object of its headers"
        )
    return found


def _check(path: str, server: str, name: str, value: object) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--mcp-headers-file: {path}: {server!r} has a header whose name HTTP does not allow"
        )
    if name.lower() in _RESERVED:
        raise ConfigError(
            f"--mcp-headers-file: {path}: {server!r}: this server sets {name} itself; leave it out"
        )
    if not isinstance(value, str) or not _VALUE.fullmatch(value):
        raise ConfigError(
            f"--mcp-headers-file: {path}: {server!r}: the value of {name} must be a text of printable ASCII characters"
        )
