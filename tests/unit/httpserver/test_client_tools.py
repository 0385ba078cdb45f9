"""Anthropic's tools that a client runs and that are known by their type alone: a shell, an editor, a memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.support.http_harness import NAME, HttpServer, http_server, say
from tests.support.scripted_answers import prompt_of

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
    assert unknown.status_code == 400
    assert "must be 'custom', got 'robot_20300101'" in unknown.json()["error"]["message"]
