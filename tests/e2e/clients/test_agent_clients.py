"""The official anthropic and openai clients, with tools, against the real server. Its model speaks nonsense, so what
must hold is asked for by construction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from pydantic import BaseModel, Field

from tests.conftest import TINY_MODEL
from tests.support.clients.official_clients import anthropic_client, openai_client
from tests.support.servers.server import Server, running_server

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["m", "km"]}},
    "required": ["a", "unit"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
MESSAGES: Any = [{"role": "user", "content": "How far is it?"}]
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": "measure", "description": "Measures.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": EMPTY}},
]
QUIET: Any = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    return "tiny-qwen3moe-q4_k_m"


@pytest.fixture(scope="module")
def oai(server: Server) -> OpenAI:
    return openai_client(server.base_url)


@pytest.fixture(scope="module")
def ant(server: Server) -> Anthropic:
    return anthropic_client(server.base_url)


def test_a_required_call_validates(oai: OpenAI, model: str) -> None:
    for seed in range(5):
        answer = oai.chat.completions.create(
            model=model,
            messages=MESSAGES,
            tools=CHAT_TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=300,
            seed=seed,
            extra_body=QUIET,
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        expected = {"measure": SCHEMA, "now": EMPTY}[call.function.name]
        jsonschema.validate(json.loads(call.function.arguments), expected)


def test_a_named_call_streams_valid_arguments(oai: OpenAI, model: str) -> None:
    chunks = oai.chat.completions.create(
        model=model,
        messages=MESSAGES,
        tools=CHAT_TOOLS,
        tool_choice={"type": "function", "function": {"name": "measure"}},
        max_tokens=300,
        stream=True,
        extra_body=QUIET,
    )
    calls = [call.function for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.name for call in calls if call and call.name] == ["measure"]
    pieces = [call.arguments or "" for call in calls if call]
    assert len([piece for piece in pieces if piece]) > 3
    jsonschema.validate(json.loads("".join(pieces)), SCHEMA)


def test_parallel_calls_have_indices_of_their_own(oai: OpenAI, model: str) -> None:
    """The model goes on calling at random: over some seeds it calls more than once."""
    counts = set()
    for seed in range(8):
        answer = oai.chat.completions.create(
            model=model,
            messages=MESSAGES,
            tools=CHAT_TOOLS[1:],
            tool_choice="required",
            max_tokens=200,
            seed=seed,
            extra_body=QUIET,
        )
        calls = answer.choices[0].message.tool_calls or []
        assert {call.function.name for call in calls if call.type == "function"} == {"now"}
        counts.add(len(calls))
    assert max(counts) > 1


def test_a_strict_tool_in_auto_mode(oai: OpenAI, server: Server, model: str) -> None:
    """Once the model opens a call, which a bias makes it do, the call is valid."""
    (opening,) = server.post("/tokenize", {"prompt": "<tool_call>"})["tokens"]
    function: Any = {"name": "measure", "parameters": SCHEMA, "strict": True}
    answer = oai.chat.completions.create(
        model=model,
        messages=MESSAGES,
        tools=[{"type": "function", "function": function}],
        parallel_tool_calls=False,
        logit_bias={str(opening): 20},
        max_tokens=300,
        extra_body=QUIET,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


class Point(BaseModel):
    x: int = Field(ge=0, le=9)
    label: str = Field(max_length=5)


def test_the_clients_own_parsing_of_structured_answers(oai: OpenAI, model: str) -> None:
    parsed = oai.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Point, max_tokens=600, extra_body=QUIET
    )
    point = parsed.choices[0].message.parsed
    assert point is not None
    assert 0 <= point.x <= 9
    response = oai.responses.parse(
        model=model, input="A point.", text_format=Point, max_output_tokens=600, reasoning={"effort": "none"}
    )
    assert response.output_parsed is not None
    assert len(response.output_parsed.label) <= 5


def test_messages_with_tools(ant: Anthropic, model: str) -> None:
    tools: Any = [{"name": "measure", "input_schema": SCHEMA}]
    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": 300,
        "messages": MESSAGES,
        "tools": tools,
        "tool_choice": {"type": "tool", "name": "measure"},
    }
    message = ant.messages.create(**asked)
    (block,) = message.content
    assert block.type == "tool_use"
    jsonschema.validate(block.input, SCHEMA)
    assert message.stop_reason == "tool_use"
    with ant.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    (block,) = final.content
    assert block.type == "tool_use"
    jsonschema.validate(block.input, SCHEMA)
    follow_up: Any = [
        *MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "5 km"}]},
    ]
    again = ant.messages.create(model=model, max_tokens=8, messages=follow_up, tools=tools)
    assert again.usage.output_tokens == 8 or again.stop_reason == "end_turn"
    assert 0 < again.usage.output_tokens <= 8


def test_messages_with_a_thought(ant: Anthropic, model: str) -> None:
    """The tiny model seldom thinks by itself: what is certain is that its answer follows and is counted."""
    message = ant.messages.create(
        model=model, max_tokens=60, messages=MESSAGES, thinking={"type": "enabled", "budget_tokens": 10}
    )
    assert {block.type for block in message.content} <= {"thinking", "text"}
    assert message.usage.output_tokens <= 60
    counted = ant.messages.count_tokens(
        model=model, messages=MESSAGES, thinking={"type": "enabled", "budget_tokens": 10}
    )
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_responses_with_tools_over_two_turns(oai: OpenAI, model: str) -> None:
    tools: Any = [{"type": "function", "name": "measure", "parameters": SCHEMA, "strict": True}]
    first = oai.responses.create(
        model=model,
        input="How far?",
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=300,
        reasoning={"effort": "none"},
    )
    (call,) = first.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    with oai.responses.stream(
        model=model,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "5 km"}],
        previous_response_id=first.id,
        tools=tools,
        tool_choice={"type": "function", "name": "measure"},
        max_output_tokens=300,
        reasoning={"effort": "none"},
    ) as stream:
        second = stream.get_final_response()
    (last_call,) = second.output
    assert last_call.type == "function_call"
    jsonschema.validate(json.loads(last_call.arguments), SCHEMA)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.mark.slow
def test_stored_responses_outlive_the_server_and_keys_come_either_way(data_dir: Path, model: str) -> None:
    from anthropic import AuthenticationError

    flags = ("--data-dir", str(data_dir), "--api-key", "secret", "--reasoning-parser", "none")
    ids: list[str] = []
    for _ in range(2):
        with running_server(TINY_MODEL, *flags) as server:
            client = openai_client(server.base_url, "secret")
            previous: Any = {"previous_response_id": ids[-1]} if ids else {}
            response = client.responses.create(model=model, input="Hi", max_output_tokens=4, **previous)
            ids.append(response.id)
            client_of_messages = anthropic_client(server.base_url, "secret")
            message = client_of_messages.messages.create(model=model, max_tokens=4, messages=MESSAGES)
            assert message.usage.output_tokens == 4
            with pytest.raises(AuthenticationError):
                anthropic_client(server.base_url, "wrong").messages.create(
                    model=model, max_tokens=4, messages=MESSAGES
                )
            assert [client.responses.retrieve(one).id for one in ids] == ids
