"""A body's tools, reasoning and grammar are made out once, however often they are asked for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from moeserve.httpserver.anthropic import bodies as anthropic_bodies
from moeserve.httpserver.anthropic.bodies import MessagesRequest
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.ollama import bodies as ollama_bodies
from moeserve.httpserver.ollama.bodies import ChatBody
from moeserve.httpserver.openai import chat_body
from moeserve.httpserver.openai.chat_body import ChatCompletionRequest
from moeserve.httpserver.responses import bodies as responses_bodies
from moeserve.httpserver.responses.bodies import ResponsesRequest
from moeserve.httpserver.transport.request_model import RequestModel

HI = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "weather", "parameters": SCHEMA}

CASES: list[tuple[type[RequestModel], Any, dict[str, Any], set[str]]] = [
    (
        ChatCompletionRequest,
        chat_body,
        {"messages": HI, "tools": [FUNCTION], "reasoning_effort": "low"},
        {"tool_use", "thinking_options"},
    ),
    (
        ResponsesRequest,
        responses_bodies,
        {"input": "Hi", "tools": [FLAT], "reasoning": {"effort": "low"}},
        {"tool_use", "thinking_options", "Toolbox"},
    ),
    (
        MessagesRequest,
        anthropic_bodies,
        {
            "model": "m",
            "max_tokens": 9,
            "messages": HI,
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "thinking": {"type": "enabled", "budget_tokens": 4},
        },
        {"ToolUse", "ThinkingOptions"},
    ),
    (
        ChatBody,
        ollama_bodies,
        {"model": "m", "messages": HI, "tools": [FUNCTION], "think": "low"},
        {"tool_use", "thinking_options"},
    ),
]


@pytest.mark.parametrize(
    ("body", "module", "given", "parsers"), CASES, ids=lambda one: getattr(one, "__name__", "")
)
def test_tools_and_reasoning_are_parsed_once(
    body: type[RequestModel],
    module: Any,
    given: dict[str, Any],
    parsers: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By validation, what is asked of the engine, and the answer's writer together."""
    calls: Counter[str] = Counter()

    def counted(name: str, parse: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return parse(*args, **kwargs)

        return call

    for name in parsers | {"chat_tool_use"} & vars(module).keys():
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    if module is chat_body:
        parsers = parsers - {"tool_use"} | {"chat_tool_use"}
    parsed: Any = body.model_validate(given)
    for _ in range(2):
        if body is ResponsesRequest:
            parsed.asked(Caller(0.0), parsed.input)
            assert parsed.toolbox is parsed.toolbox
        else:
            parsed.asked(Caller(0.0))
    assert {name: calls[name] for name in parsers} == dict.fromkeys(parsers, 1)
