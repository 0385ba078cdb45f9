"""The flags that name MCP servers and files with their headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.errors import ConfigError
from moeserve.httpserver.mcp.servers import MAX_SERVERS, McpServers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "must be a JSON object of servers"),
        ("{", "is not JSON"),
        ('{"other": {}}', "'other' is not a server of --mcp-servers, which names 'a'"),
        ('{"a": "Bearer x"}', "'a' must have a JSON object of headers"),
        ('{"a": {"X y": "v"}}', "whose name HTTP does not allow"),
        ('{"a": {"Content-Type": "v"}}', "this server sets Content-Type itself"),
        ('{"a": {"X": "v\\r\\ny: z"}}', "the value of X must be a text"),
        ('{"a": {"X": 1}}', "the value of X must be a text"),
        (None, "No such file"),
    ],
)
def test_a_file_that_has_no_headers(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "headers.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"--mcp-headers-file: .*{said}"):
        McpServers(["a=http://localhost/"], str(file))


@pytest.mark.parametrize(
    "texts",
    [
        ["http://localhost/mcp"],
        ["a b=http://localhost/mcp"],
        ["a=ftp://localhost/mcp"],
        ["a=file:///etc/passwd"],
        ["a=http:///mcp"],
        ["a=http://user:secret@localhost/mcp"],
        ["a=http://localhost:99999/mcp"],
        ["a=http://localhost/m cp"],
        ["a=http://localhost/", "a=http://localhost/"],
        [f"a{place}=http://localhost/" for place in range(MAX_SERVERS + 1)],
    ],
)
def test_flags_that_name_no_server(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="--mcp-servers"):
        McpServers(texts)
