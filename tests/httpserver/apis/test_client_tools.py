"""Tools of a kind that models do not know: Anthropic's shell, editor and memory, and OpenAI's of free text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.httpserver.openai_events import events
from tests.support.chats.scripted_answers import prompt_of
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say

ASKED: Any = {"model": NAME, "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server(context=2048) as running:
        yield running


CLIENT_TOOLS = [
    ("bash_20250124", "bash", {"command": "ls"}),
    ("text_editor_20250728", "str_replace_based_edit_tool", {"command": "view", "path": "/x"}),
    ("text_editor_20250124", "str_replace_editor", {"command": "undo_edit", "path": "/x"}),
    (
        "memory_20250818",
        "memory",
        {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
    ),
]


@pytest.mark.parametrize(("kind", "name", "given"), CLIENT_TOOLS, ids=[kind for kind, _, _ in CLIENT_TOOLS])
def test_anthropics_client_tools_are_functions(
    server: HttpServer, kind: str, name: str, given: dict[str, Any]
) -> None:
    call = json.dumps({"name": name, "arguments": given})
    server.answer = say("<tool_call>", call, "</tool_call>")
    tool = {"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}
    body = ASKED | {"tools": [tool], "tool_choice": {"type": "any"}}
    (block,) = server.post("/v1/messages", body).json()["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", name, given)
    offered = json.loads(prompt_of(server).split("<tools>\n")[1].split("\n</tools>")[0])["function"]
    assert offered["name"] == name
    jsonschema.validate(given, offered["parameters"])
    assert server.requests[-1].sampling.grammar, "the call is held to the parameters"


def test_other_tools_of_anthropics(server: HttpServer) -> None:
    editor = {"type": "text_editor_20250728", "name": "edit", "max_characters": 77}
    assert server.post("/v1/messages", ASKED | {"tools": [editor]}).status_code == 200
    assert "77 characters at most" in prompt_of(server)
    screen = {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1}
    refused = server.post("/v1/messages", ASKED | {"tools": [screen]})
    assert refused.status_code == 400
    assert "its results are pictures" in refused.json()["error"]["message"]
    unknown = server.post("/v1/messages", ASKED | {"tools": [{"type": "robot_20300101", "name": "robot"}]})
    assert unknown.status_code == 200, "new versions of clients bring such tools"
    assert "robot" not in prompt_of(server)


CUSTOM: Any = {
    "type": "custom",
    "custom": {
        "name": "query",
        "description": "Runs SQL.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "SELECT 1"'}},
    },
}
CHAT: Any = {"messages": [{"role": "user", "content": "Hi"}], "tools": [CUSTOM]}


def written(arguments: dict[str, Any], *rest: str) -> Any:
    call = json.dumps({"name": "query", "arguments": arguments})
    return say("<tool_call>\n", call[:30], call[30:], "\n</tool_call>", *rest)


def test_openais_custom_tools_in_a_chat(server: HttpServer) -> None:
    server.answer = written({"input": "SELECT 1"})
    (choice,) = server.post("/v1/chat/completions", CHAT).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["type"]) == ("tool_calls", "custom")
    assert call["custom"] == {"name": "query", "input": "SELECT 1"}
    assert 'start: \\"SELECT 1\\"' in prompt_of(server), "the model is told the grammar"

    result = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
    told = CHAT | {"messages": [*CHAT["messages"], choice["message"], result]}
    assert server.post("/v1/chat/completions", told).status_code == 200
    assert '{"name": "query", "arguments": {"input": "SELECT 1"}}' in prompt_of(server)


def test_a_custom_tools_input_in_a_stream(server: HttpServer) -> None:
    server.answer = written({"input": "SELECT 1"})
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in events(server, "/v1/chat/completions", CHAT | {"stream": True})
    ]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["custom"] == {"name": "query", "input": ""}
    assert calls[0]["type"] == "custom"
    assert "".join(call["custom"]["input"] for call in calls) == "SELECT 1"
    assert {call["index"] for call in calls} == {0}


def test_a_custom_tools_broken_call_in_a_stream(server: HttpServer) -> None:
    """Nothing of what the model wrote is lost."""
    server.answer = say('<tool_call>\n{"name": "query", "arguments": {"input": "SEL', "ECT")
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in events(server, "/v1/chat/completions", CHAT | {"stream": True})
    ]
    shown = "".join(delta.get("content") or "" for delta in deltas)
    given = "".join(call["custom"]["input"] for delta in deltas for call in delta.get("tool_calls", []))
    assert given + shown == '{"input": "SELECT'


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "query"}},
        {"type": "custom", "name": "query"},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "custom", "custom": {"name": "query"}}],
            },
        },
    ],
)
def test_a_custom_tool_that_must_be_called(server: HttpServer, choice: dict[str, Any]) -> None:
    server.answer = written({"input": "SELECT 1"})
    server.requests.clear()
    assert server.post("/v1/chat/completions", CHAT | {"tool_choice": choice}).status_code == 200
    assert server.requests[-1].sampling.grammar, "the call is held to the one argument"


def test_wrong_custom_tools_are_named(server: HttpServer) -> None:
    refused = server.post("/v1/chat/completions", CHAT | {"tools": [{"type": "custom", "custom": {}}]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools.0.custom.name"
    refused = server.post("/v1/chat/completions", CHAT | {"tools": [{"type": "robot", "name": "x"}]})
    assert "must be 'function'" in refused.json()["error"]["message"]
    unknown = {"type": "custom", "custom": {"name": "other"}}
    refused = server.post("/v1/chat/completions", CHAT | {"tool_choice": unknown})
    assert "there is no tool 'other'" in refused.json()["error"]["message"]
