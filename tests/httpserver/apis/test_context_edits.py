"""Anthropic's context edits: old results and thoughts that a request asks to leave out of the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from moeserve.httpserver.anthropic.context_edits import CLEARED
from tests.support.chats.scripted_answers import prompt_of
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say

TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("read", "write")]


def conversation(uses: int, name: str = "read") -> list[dict[str, Any]]:
    """A question with so many tool uses, each with a thought, and an answer with one; then another question."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    for number in range(uses):
        used = {"type": "tool_use", "id": f"c{number}", "name": name, "input": {"path": f"path{number}"}}
        thought = {"type": "thinking", "thinking": f"thought{number}", "signature": ""}
        result = {
            "type": "tool_result",
            "tool_use_id": f"c{number}",
            "content": f"result{number} " + "x " * 40,
        }
        messages += [
            {"role": "assistant", "content": [thought, used]},
            {"role": "user", "content": [result]},
        ]
    done = [
        {"type": "thinking", "thinking": "at last", "signature": ""},
        {"type": "text", "text": "Seen."},
    ]
    return [*messages, {"role": "assistant", "content": done}, {"role": "user", "content": "And now?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server(context=8192) as running:
        running.answer = say("Nothing.")
        yield running


def asked(server: HttpServer, *edits: Any, uses: int = 5, **fields: Any) -> dict[str, Any]:
    body = {"model": NAME, "max_tokens": 9, "messages": conversation(uses), "tools": TOOLS}
    server.requests.clear()
    answered = server.post("/v1/messages", body | {"context_management": {"edits": list(edits)}} | fields)
    assert answered.status_code == 200, answered.text
    found: dict[str, Any] = answered.json()
    return found


def cleared(**fields: Any) -> dict[str, Any]:
    return {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100}} | fields


def test_old_results_are_cleared(server: HttpServer) -> None:
    found = asked(server, cleared())
    (edit,) = found["context_management"]["applied_edits"]
    assert edit["type"] == "clear_tool_uses_20250919"
    assert edit["cleared_tool_uses"] == 2
    assert edit["cleared_input_tokens"] > 40
    prompt = prompt_of(server)
    assert prompt.count(CLEARED) == 2
    assert [f"result{number}" in prompt for number in range(5)] == [False, False, True, True, True]
    assert all(f"path{number}" in prompt for number in range(5)), "inputs stay"


def test_what_is_cleared_can_be_chosen(server: HttpServer) -> None:
    keep = {"type": "tool_uses", "value": 1}
    asked(server, cleared(keep=keep, clear_tool_inputs=True))
    assert [f"path{number}" in prompt_of(server) for number in range(5)] == [False] * 4 + [True]
    asked(server, cleared(keep=keep, clear_tool_inputs=["write"]))
    assert all(f"path{number}" in prompt_of(server) for number in range(5))
    found = asked(server, cleared(keep=keep, exclude_tools=["read"]))
    assert found["context_management"] == {"applied_edits": []}
    assert CLEARED not in prompt_of(server)


@pytest.mark.parametrize(
    "edit",
    [
        cleared(trigger={"type": "input_tokens", "value": 8000}),
        cleared(trigger={"type": "tool_uses", "value": 5}),
        cleared(clear_at_least={"type": "input_tokens", "value": 8000}),
        cleared(keep={"type": "tool_uses", "value": 5}),
        {"type": "clear_tool_uses_20250919"},
        {"type": "clear_thinking_20251015", "keep": "all"},
        {"type": "clear_thinking_20251015", "keep": {"type": "all"}},
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}},
    ],
)
def test_edits_that_are_not_due(server: HttpServer, edit: dict[str, Any]) -> None:
    assert asked(server, edit)["context_management"] == {"applied_edits": []}
    assert CLEARED not in prompt_of(server)


def test_a_trigger_by_tool_uses(server: HttpServer) -> None:
    found = asked(server, cleared(trigger={"type": "tool_uses", "value": 4}))
    assert found["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 2


def test_old_thoughts_are_cleared(server: HttpServer) -> None:
    """The template of these tests shows thoughts of the last question alone, so that two questions are needed to see
    what is kept."""
    turns = [*conversation(2), *conversation(1)[1:-1], {"role": "user", "content": "So?"}]
    found = asked(server, {"type": "clear_thinking_20251015"}, messages=turns)
    (edit,) = found["context_management"]["applied_edits"]
    assert (edit["type"], edit["cleared_thinking_turns"]) == ("clear_thinking_20251015", 1)


def test_a_stream_and_a_count_tell_of_edits(server: HttpServer) -> None:
    body: dict[str, Any] = {"model": NAME, "messages": conversation(5), "tools": TOOLS}
    body["context_management"] = {"edits": [cleared()]}
    told = server.post("/v1/messages", body | {"max_tokens": 9, "stream": True}).text
    (line,) = [line for line in told.splitlines() if line.startswith('data: {"type":"message_delta"')]
    delta = json.loads(line.removeprefix("data: "))
    (edit,) = delta["context_management"]["applied_edits"]
    counted = server.post("/v1/messages/count_tokens", body).json()
    original = counted["context_management"]["original_input_tokens"]
    assert original - counted["input_tokens"] == edit["cleared_input_tokens"] > 40


def test_other_edits_are_refused(server: HttpServer) -> None:
    body: dict[str, Any] = {"model": NAME, "max_tokens": 9, "messages": conversation(1)}
    body["context_management"] = {"edits": [{"type": "compact_20260112"}]}
    refused = server.post("/v1/messages", body)
    assert refused.status_code == 400
    assert "compact_20260112" in refused.json()["error"]["message"]
