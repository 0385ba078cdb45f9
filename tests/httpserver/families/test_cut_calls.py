"""Calls in a history whose arguments are no JSON object, in each API: clients send back what an answer that was cut off
had, as text or as what they made of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.support.chats.scripted_answers import prompt_of
from tests.support.models.family_vocabulary import write_family_model
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say

USER: Final = {"role": "user", "content": "x"}


@pytest.fixture(scope="module", params=["qwen3_coder", "deepseek_v3"])  # arguments as an object, as text
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    model = write_family_model(request.param, tmp_path_factory.mktemp("cut") / "model.gguf")
    with http_server(model=str(model), context=8192) as running:
        running.answer = say("Hi")
        yield running


def _chat(arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": "BESIDE", "tool_calls": [call]}
    return {"messages": [USER, answer, {"role": "tool", "tool_call_id": "c", "content": "RESULT"}]}


def _ollama(arguments: Any) -> dict[str, Any]:
    return _chat(arguments) | {"stream": False}


def _anthropic(arguments: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "BESIDE"}, call]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "RESULT"}
    return {"max_tokens": 4, "messages": [USER, answer, {"role": "user", "content": [result]}]}


def _responses(arguments: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "c", "output": "RESULT"}
    return {"input": [USER, {"role": "assistant", "content": "BESIDE"}, call, result]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", _chat),
        ("/api/chat", _ollama),
        ("/v1/messages", _anthropic),
        ("/v1/responses", _responses),
    ],
)
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": "SHOWN', "SHOWN"),
        ('["SHOWN"]', "SHOWN"),
        ('"SHOWN', "SHOWN"),
        ('{"a": 1}{"SHOWN": 2}', "SHOWN"),
        ('{"a": {"b": [1, ', "f"),
        ("", "f"),
        ("null", "f"),
        (None, "f"),
        (["SHOWN"], "SHOWN"),
        (12345678, "12345678"),
        (True, "f"),
        ({"a": {"b": "SHOWN"}}, "SHOWN"),
        ('{"a": -123456789012345678901234567890}', "-123456789012345678901234567890"),
        ('{"a": ' + "[" * 2000, "f"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "f"),
    ],
)
def test_a_call_without_an_object_of_arguments(
    server: HttpServer, path: str, body: Any, arguments: Any, shown: str
) -> None:
    server.requests.clear()
    response = server.post(path, {"model": NAME} | body(arguments))
    assert response.status_code == 200, response.text
    prompt = prompt_of(server)
    assert "BESIDE" in prompt
    assert shown in prompt.partition("BESIDE")[2].partition("RESULT")[0]
    assert "RESULT" in prompt
