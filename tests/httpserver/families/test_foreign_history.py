"""Histories that began elsewhere: items, blocks and parts that only another server understands (openai/codex 0.149's
`additional_tools`: envoyproxy/ai-gateway#2586, token_proxy#307), and forms of numbers and bodies."""

from __future__ import annotations

import codecs
import json
from typing import Any, Final

import httpx
import pytest

from moeserve.httpserver.transport.request_state import IGNORED_FIELDS
from tests.support.chats.scripted_answers import SCHEMA, prompt_of
from tests.support.servers.http_harness import NAME, HttpServer, echo

HI: Final[dict[str, Any]] = {"role": "user", "content": "Hi"}
WEATHER: Final = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA}


@pytest.fixture(autouse=True)
def _as_new(server: HttpServer) -> None:
    server.answer = echo
    server.requests.clear()


def taken(server: HttpServer, path: str, body: dict[str, Any]) -> str:
    """Returns the header with what was dropped."""
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    dropped: str = response.headers.get(IGNORED_FIELDS, "")
    return dropped


def responded(server: HttpServer, *items: dict[str, Any], **body: Any) -> str:
    return taken(server, "/v1/responses", {"input": list(items), "max_output_tokens": 3} | body)


def test_tools_that_come_as_an_item(server: HttpServer) -> None:
    space = {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}
    item = {"type": "additional_tools", "role": "developer", "id": "at_1", "tools": [WEATHER, space]}
    assert not responded(server, item, HI, tools=[WEATHER])
    prompt = prompt_of(server)
    assert prompt.count('"name": "weather"') == 1
    assert '"name": "exec"' in prompt
    assert not responded(server, HI, {"type": "additional_tools", "tools": []}, HI)
    assert not responded(server, HI, {"type": "tool_search_output", "call_id": "c", "tools": [WEATHER]})
    assert '"name": "weather"' in prompt_of(server)
    many = {"type": "additional_tools", "tools": [WEATHER | {"name": f"w{i}"} for i in range(5000)]}
    assert server.post("/v1/responses", {"input": [many, HI]}).status_code == 400


@pytest.mark.parametrize(
    "kind",
    [
        *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"),
        *("mcp_call", "mcp_list_tools", "mcp_approval_request", "computer_call", "compaction"),
        *("tool_search_call", "ghost_snapshot", "agent_message", "of_next_year"),
    ],
)
def test_items_that_nobody_knows_here_are_dropped_and_named(server: HttpServer, kind: str) -> None:
    item = {"type": kind, "id": "x_1", "status": "completed", "action": {"type": "search"}, "output": None}
    assert responded(server, HI, item, HI) == f"input[].type={kind}"
    assert prompt_of(server).count("Hi") == 2


def test_outputs_in_other_forms(server: HttpServer) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    for output, shown in (
        (None, ""),
        ({"content": "Rain.", "success": True}, "Rain."),
        ({"sky": "grey"}, '{"sky": "grey"}'),
    ):
        responded(server, HI, call, {"type": "function_call_output", "call_id": "c", "output": output})
        assert f"<tool_response>\n{shown}\n</tool_response>" in prompt_of(server)


def test_blocks_of_tools_that_ran_at_anthropic(server: HttpServer) -> None:
    blocks = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "compaction", "content": "What was said."},
        {"type": "text", "text": "It rains."},
    ]
    body = {"model": NAME, "max_tokens": 3, "messages": [HI, {"role": "assistant", "content": blocks}, HI]}
    told = taken(server, "/v1/messages", body)
    place = "messages[].content[].type="
    assert told == f"{place}server_tool_use, {place}web_search_tool_result"
    assert "What was said.It rains." in prompt_of(server)
    body["messages"] = [{"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}]
    assert server.post("/v1/messages", body).status_code == 400  # what a user sends is not dropped


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "reasoning", "text": "Hm."},
    ],
)
def test_reasoning_in_the_parts_of_a_chat(server: HttpServer, part: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    content = [part, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "I look."}]
    said = {"role": "assistant", "content": content, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "c", "content": "Rain."}
    taken(server, "/v1/chat/completions", {"messages": [HI, said, told], "max_tokens": 3})
    assert "<think>\nHm.\n</think>\n\nI look." in prompt_of(server)


def test_whole_numbers_with_a_point(server: HttpServer) -> None:
    """Ollama, llama-server and vLLM take them."""
    body: dict[str, Any] = {"model": NAME, "messages": [HI], "stream": False}
    taken(server, "/api/chat", body | {"options": {"num_predict": 2.0, "top_k": 3.0, "seed": 5.0}})
    assert server.requests[-1].sampling.max_tokens == 2
    taken(server, "/completion", {"prompt": "Hi", "n_predict": 2.0})
    assert server.requests[-1].sampling.max_tokens == 2
    for value in (2.5, "2", True):
        assert server.post("/api/chat", body | {"options": {"num_predict": value}}).status_code == 400
    taken(server, "/v1/chat/completions", body | {"max_tokens": 2.0})


def test_a_byte_order_mark(server: HttpServer) -> None:
    body = codecs.BOM_UTF8 + json.dumps({"messages": [HI], "max_tokens": 2}).encode()
    assert httpx.post(f"{server.url}/v1/chat/completions", content=body, timeout=60).status_code == 200
