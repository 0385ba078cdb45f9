"""/v1/mcp: the real HTTP process against an MCP server that keeps to the specification, and against others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeserve.httpserver.mcp.client import MAX_BYTES
from tests.support.servers.http_harness import TLS, HttpServer, http_server
from tests.support.servers.mcp_server import ADD, FAIL, McpServer, running_mcp_server


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[McpServer, HttpServer]]:
    # Nothing listens at the discard port.
    with (
        running_mcp_server() as tools,
        http_server(mcp_servers=(f"demo={tools.url}", "gone=http://127.0.0.1:9/mcp")) as server,
    ):
        yield tools, server


@pytest.fixture
def tools(running: tuple[McpServer, HttpServer]) -> McpServer:
    """The module's MCP server, as it was at first."""
    tools = running[0]
    for name, value in vars(McpServer(port=tools.port)).items():
        setattr(tools, name, value)
    return tools


@pytest.fixture
def server(running: tuple[McpServer, HttpServer], tools: McpServer) -> HttpServer:
    return running[1]


def post(server: HttpServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/mcp/servers/{path}", json=body, timeout=60, verify=TLS)


@pytest.mark.parametrize("streams", [False, True])
def test_tools_are_listed_and_called_in_one_session(
    server: HttpServer, tools: McpServer, streams: bool
) -> None:
    tools.streams = streams
    assert httpx.get(f"{server.url}/v1/mcp/servers", verify=TLS).json() == {
        "servers": [{"name": "demo"}, {"name": "gone"}]
    }, "names only: the addresses are the operator's"
    listed = post(server, "demo/tools").json()
    assert listed["tools"] == [
        {"name": one["name"], "description": one["description"], "input_schema": one["inputSchema"]}
        for one in (ADD, FAIL)
    ]
    session = listed["session"]
    answer = post(server, "demo/call", tool="add", arguments={"a": 2, "b": 40}, session=session).json()
    assert answer == {"session": session, "is_error": False, "content": [{"type": "text", "text": "42"}]}
    failed = post(server, "demo/call", tool="fail", arguments={}, session=session).json()
    assert failed["is_error"]
    assert failed["content"][0]["text"] == "out of paper"
    assert tools.calls == [("add", {"a": 2, "b": 40}), ("fail", {})]
    assert tools.begun == 1


def test_a_session_that_the_server_has_forgotten_is_replaced(server: HttpServer, tools: McpServer) -> None:
    first = post(server, "demo/tools").json()["session"]
    tools.sessions.clear()
    answer = post(server, "demo/call", tool="add", arguments={"a": 1, "b": 1}, session=first).json()
    assert answer["content"][0]["text"] == "2"
    assert answer["session"] != first
    assert tools.calls == [("add", {"a": 1, "b": 1})], "called once"


def test_only_the_operators_addresses_are_asked(server: HttpServer, tools: McpServer) -> None:
    with running_mcp_server() as other:
        for name in ("other", "http:%2F%2F127.0.0.1", "..%2Fdemo", "demo%0d%0ax"):
            assert post(server, f"{name}/tools").status_code in (404, 405), name
        numbers = {"a": 1, "b": 1}
        answer = post(server, "demo/call", tool="add", arguments=numbers, url=other.url, name=other.url)
        assert answer.status_code == 200
        assert tools.calls == [("add", numbers)], "a field of the body chooses no address"
        tools.status, tools.location = 307, other.url
        moved = post(server, "demo/tools")
        assert moved.status_code == 502
        assert "HTTP status 307" in moved.json()["error"]["message"]
        assert other.headers == []


def test_nothing_of_the_browsers_goes_to_the_server(server: HttpServer, tools: McpServer) -> None:
    headers = {"authorization": "Bearer sk-1", "cookie": "a=b", "x-forwarded-for": "10.0.0.1"}
    httpx.post(f"{server.url}/v1/mcp/servers/demo/tools", json={}, headers=headers, timeout=60, verify=TLS)
    assert tools.headers
    for sent in tools.headers:
        assert not {"authorization", "cookie", "x-forwarded-for", "referer", "origin"} & sent.keys()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"status": 401}, "HTTP status 401; correct its headers in --mcp-headers-file"),
        ({"status": 404}, "HTTP status 404; correct its address in --mcp-servers"),
        ({"status": 500}, "HTTP status 500; see its own log"),
        ({"raw": b"<html>"}, "is not JSON"),
        ({"raw": b"[]"}, "to another request"),
        ({"raw": b'{"jsonrpc": "2.0", "id": 7, "result": {}}'}, "to another request"),
        ({"raw": b'{"jsonrpc": "2.0", "id": 1, "result": []}'}, "neither a result nor an error"),
        ({"raw": b'{"jsonrpc": "2.0", "id": 1, "error": {"message": "not today"}}'}, "refused: not today"),
        ({"version": "1999-01-01"}, "1999-01-01"),
    ],
)
def test_a_server_that_does_otherwise_is_said(
    server: HttpServer, tools: McpServer, fields: dict[str, Any], words: str
) -> None:
    for name, value in fields.items():
        setattr(tools, name, value)
    refused = post(server, "demo/tools")
    assert refused.status_code == 502
    assert words in refused.json()["error"]["message"]
    assert "'demo'" in refused.json()["error"]["message"]


def test_one_that_cannot_be_reached_and_one_that_says_too_much(server: HttpServer, tools: McpServer) -> None:
    gone = post(server, "gone/tools")
    assert (gone.status_code, gone.json()["error"]["code"]) == (502, "mcp_unreachable")
    tools.pad = MAX_BYTES
    much = post(server, "demo/call", tool="add", arguments={"a": 1, "b": 1})
    assert (much.status_code, "MiB" in much.json()["error"]["message"]) == (502, True)


@pytest.mark.parametrize(
    "session", ["x", "2025-06-18 a\r\nx: y", "2025-06-18 " + "a" * 2000, "2025-06-18 ä", "2025-06-18  "]
)
def test_a_session_that_is_none_is_refused(server: HttpServer, tools: McpServer, session: str) -> None:
    refused = post(server, "demo/tools", session=session)
    assert refused.status_code == 400
    assert tools.headers == []


def test_headers_of_the_operator_go_to_their_server_alone(tmp_path: Path) -> None:
    with running_mcp_server() as first, running_mcp_server() as second:
        file = tmp_path / "headers.json"
        file.write_text(json.dumps({"first": {"Authorization": "Bearer secret-token", "X-Team": "a b"}}))
        urls = (f"first={first.url}", f"second={second.url}")
        with http_server(mcp_servers=urls, mcp_headers_file=str(file)) as server:
            for name in ("first", "second"):
                assert post(server, f"{name}/tools").status_code == 200
            first.status = 401
            assert "secret-token" not in post(server, "first/tools").text
        assert {one["authorization"] for one in first.headers} == {"Bearer secret-token"}
        assert first.headers[0]["x-team"] == "a b"
        assert first.headers[0]["content-type"] == "application/json"
        assert not any("authorization" in one for one in second.headers)


def test_it_is_off_unless_the_operator_names_servers() -> None:
    with http_server(api_key=("k",)) as running:
        url = f"{running.url}/v1/mcp/servers"
        assert httpx.get(url, verify=TLS).status_code == 401
        with httpx.Client(headers={"authorization": "Bearer k"}, verify=TLS) as client:
            assert client.get(url).json() == {"servers": []}
            refused = client.post(f"{url}/demo/tools", json={})
            assert (refused.status_code, "--mcp-servers names none" in refused.text) == (404, True)
