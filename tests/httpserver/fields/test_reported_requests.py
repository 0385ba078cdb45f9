"""Requests from public reports about other servers and their clients, which this server answered wrongly."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.chats.scripted_answers import SCHEMA, prompt_of
from tests.support.servers.fresh_server import as_new
from tests.support.servers.http_harness import NAME, HttpServer, echo, say

CHAT = "/v1/chat/completions"
HI: Any = {"role": "user", "content": "Hi"}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
MESSAGES: Any = {"model": NAME, "max_tokens": 4, "messages": [HI]}
HALF = "\\ud83d"  # of an emoji, as JavaScript writes it

_as_new = as_new(echo)


def taken(server: HttpServer, path: str, body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (HALF, "\ufffd"),
        ("\\uDE00 x", "\ufffd x"),
        (HALF + HALF + "\\ude00", "\ufffd\U0001f600"),
        (f"\\\\ud83d {HALF}", "\\ud83d \ufffd"),  # an escaped backslash is none
        ("\\\\ud83d\\ude00", "\\ud83d\ufffd"),
        (f'\\"{HALF}\\"', '"\ufffd"'),
    ],
)
def test_half_an_emoji(server: HttpServer, written: str, read: str) -> None:
    """anthropics/claude-code: "no low surrogate in string" for each further request of the conversation, whose tool
    result was cut within an emoji."""
    body = '{"max_tokens": 1, "messages": [{"role": "user", "content": "<' + written + '>"}]}'
    response = httpx.post(server.url + CHAT, content=body, timeout=30)
    assert response.status_code == 200, response.text
    assert f"<{read}>" in prompt_of(server)


def test_half_an_emoji_in_a_calls_arguments(server: HttpServer) -> None:
    """The model's own text: it came back with each further request, and no template could show it."""
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "weather", "arguments": f'{{"city": "{HALF}"}}'},
    }
    messages = [
        HI,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "3"},
    ]
    taken(server, CHAT, {"messages": messages, "tools": [WEATHER], "max_tokens": 1})
    assert "\ufffd" in prompt_of(server)


@pytest.mark.parametrize("stream", [False, True])
def test_half_an_emoji_in_the_models_call(server: HttpServer, stream: bool) -> None:
    """APIs that have the arguments as an object."""
    server.answer = say(
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{HALF}"}}}}\n</tool_call>'
    )
    ollama = {"model": NAME, "messages": [HI], "tools": [WEATHER], "stream": stream}
    answer = server.post("/api/chat", ollama)
    assert answer.status_code == 200
    assert json.loads(answer.text.splitlines()[0])["message"]["tool_calls"][0]["function"]["arguments"] == {
        "city": "\ufffd"
    }
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    (block,) = taken(server, "/v1/messages", MESSAGES | {"tools": tools})["content"]
    assert (block["type"], block["input"]) == ("tool_use", {"city": "\ufffd"})


@pytest.mark.parametrize(
    "asked",
    [
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "disabled", "clear_thinking": False}, "reasoning_effort": "high"},
        {"enable_thinking": False},
    ],
)
def test_other_switches_of_reasoning(server: HttpServer, asked: dict[str, Any]) -> None:
    """yigit353/langchain-qwq#21 and others: a switch that another provider's API has did nothing."""
    body = {"messages": [HI], "max_tokens": 1}
    taken(server, CHAT, body | {"chat_template_kwargs": {"enable_thinking": False}})
    off = prompt_of(server)
    taken(server, CHAT, body)
    assert prompt_of(server) != off
    taken(server, CHAT, body | asked)
    assert prompt_of(server) == off


def test_a_budget_of_reasoning_in_its_switch(server: HttpServer) -> None:
    """Lua's and JavaScript's clients write 50.0."""
    switch = {"type": "enabled", "budget_tokens": 50}
    forms: list[dict[str, Any]] = [
        {"thinking": switch},
        {"thinking": switch | {"budget_tokens": 50.0}},
        {"reasoning": {"max_tokens": 50.0}},
    ]
    for form in forms:
        taken(server, CHAT, {"messages": [HI], "max_tokens": 1} | form)
        thinking = server.requests[-1].sampling.thinking
        assert thinking is not None
        assert thinking.budget == 50
    assert server.post(CHAT, {"messages": [HI], "reasoning": {"max_tokens": 50.5}}).status_code == 400
    for asked in (
        {"thinking": switch, "thinking_token_budget": 0},
        {"thinking": {"type": "enabled"}, "reasoning_effort": "none"},
        {"enable_thinking": True, "thinking": {"type": "disabled"}},
    ):
        assert server.post(CHAT, {"messages": [HI]} | asked).status_code == 400


@pytest.mark.parametrize("choice", ["any", {"type": "any"}, {"type": "tool", "name": "weather"}])
def test_choices_of_tools_in_anthropics_form(server: HttpServer, choice: Any) -> None:
    """Mistral's and Anthropic's words: gateways pass them on as they are."""
    taken(server, CHAT, {"messages": [HI], "tools": [WEATHER], "tool_choice": choice, "max_tokens": 1})
    assert server.requests[-1].sampling.grammar


def test_the_older_name_of_anthropics_output_format(server: HttpServer) -> None:
    """Clients from before output_config: the answer was not JSON, without a word."""
    form = {"type": "json_schema", "schema": SCHEMA | {"additionalProperties": False}}
    taken(server, "/v1/messages", MESSAGES | {"output_format": form})
    assert server.requests[-1].sampling.grammar
    other = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    refused = server.post("/v1/messages", MESSAGES | {"output_format": form, "output_config": other})
    assert "contradicts output_config.format" in refused.text


@pytest.mark.parametrize("stream", [False, True])
def test_no_answer_but_a_computed_prompt(server: HttpServer, stream: bool) -> None:
    """Anthropic's pre-warming of the prompt cache: max_tokens 0."""
    answer = server.post("/v1/messages", MESSAGES | {"max_tokens": 0, "stream": stream})
    assert answer.status_code == 200
    assert server.requests[-1].sampling.max_tokens == 0
    assert '"stop_reason":"max_tokens"' in answer.text
    assert stream or answer.json()["content"] == []
    as_later = {"max_tokens": 0, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert server.post("/v1/messages", MESSAGES | as_later).status_code == 200


def test_a_response_that_is_gone(server: HttpServer) -> None:
    """Soju06/codex-lb#818: clients that see this status and code send the whole conversation again."""
    refused = server.post("/v1/responses", {"input": "x", "previous_response_id": "resp_gone"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "previous_response_not_found")
    assert error["type"] == "invalid_request_error"
    assert server.get("/v1/responses/resp_gone").status_code == 404


def test_codex_accepts_the_version_of_ollama(server: HttpServer) -> None:
    """openai/codex: --oss ends with "Codex requires Ollama 0.13.4 or newer"."""
    version = server.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)


def test_stop_strings_end_the_answer_not_the_reasoning(server: HttpServer) -> None:
    """sgl-project/sglang#40529, vllm-project/vllm#38499: the answer was empty, because the model had planned it."""
    body = {"messages": [HI], "max_tokens": 1}
    taken(server, CHAT, body | {"stop": ["x"]})
    reasoning = server.requests[-1].text.reasoning
    assert reasoning is not None
    assert not reasoning.is_open
    for asked in (
        {},
        {"stop": ["x"], "enable_thinking": False},
        {"stop": ["x"], "separate_reasoning": False},
    ):
        taken(server, CHAT, body | asked)
        assert server.requests[-1].text.reasoning is None


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("response_format", {"type": "json_object"}, "text.format"),
        ("max_tokens", 5, "max_output_tokens"),
        ("reasoning_effort", "low", "reasoning.effort"),
    ],
)
def test_fields_of_chats_in_responses(server: HttpServer, field: str, value: Any, instead: str) -> None:
    """lmstudio-ai/lmstudio-bug-tracker#2403: the answer was no JSON, without a word."""
    refused = server.post("/v1/responses", {"input": "x", field: value})
    assert refused.status_code == 400
    assert f"{field}: is not supported" in refused.text
    assert f"use {instead}" in refused.text


def test_which_turns_reasoning_the_model_sees(server: HttpServer) -> None:
    """Newer agents send it with each request, which was refused."""
    for context in ("all_turns", "current_turn", "auto"):
        taken(server, "/v1/responses", {"input": "x", "reasoning": {"effort": "low", "context": context}})


def test_num_predict_0_is_no_limit(server: HttpServer) -> None:
    """Clients in Go send 0 for a number that was not set, which Ollama takes as none; the answer was one token."""
    taken(
        server, "/api/chat", {"model": NAME, "messages": [HI], "stream": False, "options": {"num_predict": 0}}
    )
    assert server.requests[-1].sampling.max_tokens > 100


@pytest.mark.parametrize("prompt", [["a", "b"], [1, 2, "a"], [[1, 2]], 5, [1.5], [True]])
def test_several_prompts_for_llama_servers_completion(server: HttpServer, prompt: Any) -> None:
    error = server.post("/completion", {"prompt": prompt}).json()["error"]
    assert error["param"] == "prompt"
    assert "send several prompts to /v1/completions" in error["message"]
