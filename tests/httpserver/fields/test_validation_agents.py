"""/v1/messages and /v1/responses: every field with values it must refuse, by name, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.clients.refused_values import (
    BAD_SCHEMAS,
    NOT_BOOLEANS,
    NOT_INTEGERS,
    NOT_NUMBERS,
    NOT_STRINGS,
    UNENFORCED,
)
from tests.support.servers.engine_messages import CONTEXT
from tests.support.servers.http_harness import NAME, HttpServer


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}} | more


def function(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name} | more


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}
TEXT = {"type": "text", "text": "Hi"}

MESSAGES: dict[str, list[Any]] = {
    "model": [*NOT_STRINGS, "x" * 513, None],
    "max_tokens": [*NOT_INTEGERS, -1, None],
    "messages": [
        *[5, "hi", {}, [], [5], [{}], [{"role": "user"}], [{"content": "hi"}], None],
        *[
            [{"role": "tool", "content": "hi"}],
            [user()],
            [user(IMAGE)],
            [user({"type": "text"})],
            [user("hi")],
        ],
        [user({"type": "tool_result"})],
        [user({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]})],
        [user(TEXT | {"citations": [{}]})],
        [user(TEXT), {"role": "assistant", "content": []}],
        [
            user(TEXT),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]},
        ],
        [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}, user(TEXT)],
        [user(TEXT | {"text": "long " * CONTEXT})],
    ],
    "system": [5, [5], [IMAGE]],
    "stop_sequences": [5, "x", [""], [5], ["x"] * 17],
    "stream": NOT_BOOLEANS,
    "temperature": [*NOT_NUMBERS, -0.1, 1.1],
    "top_p": [*NOT_NUMBERS, 0, 1.1],
    "top_k": [*NOT_INTEGERS, -1],
    "tools": [
        *[5, [5], [{}], [{"name": "f"}], [tool("f g")], [tool(), tool()], [tool()] * 513],
        *[[{"type": "computer_20250124", "name": "screen"}], [tool(input_schema={"type": "array"})]],
        *[[tool(strict="yes")], [tool(input_examples=[5])]],
        [tool(strict=True, input_schema={"properties": {"a": {"type": "nothing"}}})],
    ],
    "tool_choice": [
        *[5, "auto", {"type": "all"}, {"type": "any"}, {"type": "tool"}, {"type": "tool", "name": "f"}],
        {"type": "auto", "name": "f"},
    ],
    "thinking": [
        *[5, {"type": "enabled"}, {"type": "enabled", "budget_tokens": 0}, {"type": "on"}],
        *[{"type": "disabled", "budget_tokens": 5}, {"type": "enabled", "budget_tokens": 20}],
        {"type": "adaptive", "display": 5},
    ],
    "output_config": [
        *[5, {"effort": "some"}, {"format": {"type": "text"}}, {"format": {"type": "json_schema"}}],
        *[{"format": {"type": "json_schema", "schema": schema}} for schema in (UNENFORCED, *BAD_SCHEMAS)],
    ],
    "mcp_servers": [[{}]],
    "container": ["x"],
    "context_management": [
        *[5, {"edits": 5}, {"edits": [{}]}, {"edits": [{"type": "compact_20260112"}]}],
        *[
            {"edits": [{"type": "clear_tool_uses_20250919"} | wrong]}
            for wrong in ({"keep": 5}, {"trigger": {"type": "tokens", "value": 1}}, {"exclude_tools": [5]})
        ],
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}]},
    ],
}
RESPONSES: dict[str, list[Any]] = {
    "model": [*NOT_STRINGS, "x" * 513],
    "input": [
        *[
            5,
            {},
            [],
            [5],
            [{}],
            [{"role": "user"}],
            [{"role": "x", "content": "hi"}],
            None,
            "long " * CONTEXT,
        ],
        *[[{"type": "item_reference", "id": "x"}], [{"type": "web_search_call", "id": "x"}]],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "input_text"}]}],
        [{"type": "function_call", "name": "f", "arguments": "{}"}],
        [{"type": "function_call_output", "call_id": "x", "output": 5}],
        [{"type": "reasoning", "summary": [], "encrypted_content": 5}],
    ],
    "instructions": NOT_STRINGS,
    "previous_response_id": [5, ["x"], "x", "resp_nothing", "resp_", "resp_a b"],
    "tools": [
        *[5, [5], [{}], [{"type": "custom"}], [function("f g")]],
        *[
            [function(), function()],
            [function(parameters={"type": "array"})],
            [function(strict=5)],
            [{"type": "shell", "environment": {"type": "container_auto"}}],
        ],
    ],
    "tool_choice": ["required", "any", 5, function(), {"type": "allowed_tools"}],
    "parallel_tool_calls": NOT_BOOLEANS,
    "reasoning": [5, {"effort": "some"}, {"mode": "pro"}],
    "text": [
        *[
            5,
            {"format": {"type": "xml"}},
            {"format": {"type": "json_schema", "name": "x"}},
        ],
        *[{"format": {"type": "json_schema", "name": "x", "schema": schema}} for schema in BAD_SCHEMAS],
        {"format": {"type": "json_schema", "name": "x", "schema": UNENFORCED, "strict": True}},
        {"format": {"type": "text", "schema": {}}},
    ],
    "stream": NOT_BOOLEANS,
    "stream_options": [5],
    "store": NOT_BOOLEANS,
    "max_output_tokens": [*NOT_INTEGERS, 0, -1, CONTEXT],
    "temperature": [*NOT_NUMBERS, -0.1, 2.1],
    "top_p": [*NOT_NUMBERS, 0, 1.1],
    "top_logprobs": [*NOT_INTEGERS, -1, 21],
    "truncate_prompt_tokens": [*NOT_INTEGERS, -2, 0],
    "include": [5, [5], ["no_such_call.results"] * 65],
    "metadata": [5, "x"],
    "truncation": ["always", 5],
    "background": NOT_BOOLEANS,
    "conversation": ["x"],
    "prompt": [{"id": "x"}],
}
# Where the message names the field that disagrees with this one.
NAMED_INSTEAD = {
    "previous_response_id": "previous_response_id|stored response",
    "messages": "messages|prompt is too long",  # Anthropic's words, which Claude Code looks for
}


@pytest.fixture(scope="module", autouse=True)
def _none_reaches_the_engine(server: HttpServer) -> Iterator[None]:
    yield
    assert server.requests == [], "a refused request reached the engine"


def refused(response: httpx.Response, name: str, value: Any) -> None:
    what = f"{name}={str(value)[:80]}"
    assert response.status_code in (400, 404), f"{what}: {response.status_code} {response.text[:200]}"
    message = response.json()["error"]["message"]
    assert re.search(NAMED_INSTEAD.get(name, name), message), f"{what}: {message}"
    assert len(message) < 700, what


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_field(client: httpx.Client, name: str) -> None:
    for value in MESSAGES[name]:
        body = {"model": NAME, "max_tokens": 20, "messages": [user(TEXT)], name: value}
        refused(client.post("/v1/messages", json=body), name, value)


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_field(client: httpx.Client, name: str) -> None:
    for value in RESPONSES[name]:
        body = {"model": NAME, "input": "Hi", name: value}
        refused(client.post("/v1/responses", json=body), name, value)


@pytest.mark.parametrize("name", ["messages", "system", "tools", "tool_choice", "thinking", "model"])
def test_count_tokens_field(client: httpx.Client, name: str) -> None:
    for value in MESSAGES[name]:
        if (
            value == {"type": "enabled", "budget_tokens": 20}
            or "strict" in str(value)
            or "long" in str(value)
        ):
            continue  # for max_tokens, the grammar or the context, which counting has no part in
        body = {"model": NAME, "messages": [user(TEXT)], name: value}
        refused(client.post("/v1/messages/count_tokens", json=body), name, value)


def test_stored_responses_that_are_not_there(client: httpx.Client) -> None:
    for path in ("/v1/responses/resp_x", "/v1/responses/x%00y", "/v1/responses/" + "x" * 5000):
        assert client.get(path).status_code == 404
        assert client.delete(path).status_code == 404
    assert client.get("/v1/responses/resp_x/input_items").status_code == 404
    for query in ("limit=0", "limit=101", "limit=x", "limit=%F0%9F%98%80", "order=up", "other=1"):
        assert client.get(f"/v1/responses/resp_x/input_items?{query}").status_code == 400
    assert client.get("/v1/responses/resp_x?stream=true").status_code == 404
    assert client.get("/v1/responses/resp_x?stream=1").status_code == 400
    assert client.post("/v1/responses/resp_x/cancel").status_code == 404
