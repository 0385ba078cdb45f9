"""Tools of a server that the MCP project's own library runs. It needs MOESERVE_CLIENTS (`make test-clients`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers.http_harness import TLS, http_server

PROGRAM = Path(__file__).parent / "programs" / "mcp_tools.py"
CLIENTS = os.environ.get("MOESERVE_CLIENTS")


@pytest.fixture
def address() -> Iterator[str]:
    if CLIENTS is None:
        pytest.skip("MOESERVE_CLIENTS is not set: make test-clients")
    command = [str(Path(CLIENTS) / "venv" / "bin" / "python"), str(PROGRAM)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        process.kill()


def test_tools_of_the_librarys_server(address: str) -> None:
    with (
        http_server(mcp_servers=(f"tools={address}",)) as server,
        httpx.Client(base_url=f"{server.url}/v1/mcp/servers/tools/", timeout=60, verify=TLS) as client,
    ):
        listed = client.post("tools", json={}).json()
        schemas = {tool["name"]: tool["input_schema"] for tool in listed["tools"]}
        assert set(schemas) == {"add", "fail"}
        assert set(schemas["add"]["properties"]) == {"a", "b"}
        call = {"tool": "add", "arguments": {"a": 2, "b": 40}, "session": listed["session"]}
        answer = client.post("call", json=call).json()
        assert (answer["is_error"], answer["content"][0]["text"]) == (False, "42")
        assert answer["session"] == listed["session"]
        failed = client.post("call", json={"tool": "fail", "session": listed["session"]}).json()
        assert failed["is_error"]
        lost = client.post("call", json=call | {"session": listed["session"] + "0"}).json()
        assert lost["content"][0]["text"] == "42", "a session that it does not know is replaced"
