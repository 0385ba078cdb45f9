"""Every field of every request with values it must refuse: a 400 in OpenAI's shape that names the field and,
where there is one, its range."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.clients.refused_values import (
    BAD_SCHEMAS,
    HUGE,
    INT64,
    NOT_BOOLEANS,
    NOT_INTEGERS,
    NOT_NUMBERS,
    NOT_STRINGS,
    NOT_WHOLE,
    UNENFORCED,
)
from tests.support.servers.engine_messages import CONTEXT
from tests.support.servers.http_harness import NAME, HttpServer

VOCABULARY = 4096


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


OPENAI: dict[str, list[Any]] = {
    "n": [*NOT_WHOLE, 0, -1, 129],
    "stream": NOT_BOOLEANS,
    "stream_options": [5, {"include_usage": 1}, {"include_usage": True}],
    "temperature": [*NOT_NUMBERS, -0.01, 2.01, HUGE],
    "top_p": [*NOT_NUMBERS, 0, -0.1, 1.01],
    "top_k": [*NOT_WHOLE, -2, 1 << 31],
    "min_p": [*NOT_NUMBERS, -0.01, 1.01],
    "presence_penalty": [*NOT_NUMBERS, -2.01, 2.01],
    "frequency_penalty": [*NOT_NUMBERS, -2.01, 2.01],
    "repetition_penalty": [*NOT_NUMBERS, 0, -1, 101],
    "logit_bias": [
        *[5, {"x": 1}, {"-1": 1}, {"1.5": 1}, {"5": 101}, {"5": -101}, {"5": "1"}],
        *[{str(VOCABULARY): 1}, {str(i): 1 for i in range(1025)}],
    ],
    "seed": [*NOT_WHOLE, INT64, -INT64 - 1],
    "stop": [5, {"a": 1}, [5], ["x"] * 17, "x" * 1025],
    "stop_token_ids": [5, "x", ["x"], [-1], [1.5], [True], [VOCABULARY], [1] * 257],
    "include_stop_str_in_output": NOT_BOOLEANS,
    "ignore_eos": NOT_BOOLEANS,
    "min_tokens": [*NOT_WHOLE, -1, 2],
    "skip_special_tokens": NOT_BOOLEANS,
    "return_tokens_as_token_ids": NOT_BOOLEANS,
    "return_progress": [*NOT_BOOLEANS, True],
    "priority": [*NOT_WHOLE, 1 << 31, -(1 << 31) - 1],
    "model": [*NOT_STRINGS, "x" * 513],
    "use_beam_search": NOT_BOOLEANS,
    "beam_width": [*NOT_WHOLE, 0, 21, 2],
    "length_penalty": [*NOT_NUMBERS, -8.1, 8.1],
    "early_stopping": [5, "always", []],
    "num_beam_groups": [*NOT_WHOLE, 0, 21, 2],
    "diversity_penalty": [*NOT_NUMBERS, -0.1, 101, 0.5],
    "response_format": [
        *[5, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}],
        *[{"type": "text", "json_schema": {"schema": {}}}, {"type": "text", "schema": {}}],
        {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}},
        *[{"type": "json_schema", "json_schema": {"schema": schema}} for schema in BAD_SCHEMAS],
        {"type": "json_schema", "json_schema": {"schema": UNENFORCED, "strict": True}},
    ],
    "guided_json": [5, [], "{", "[]", UNENFORCED, *BAD_SCHEMAS],
    "guided_regex": [5, "(", "a" * 70_000],
    "guided_choice": ["a", [], [""], ["a", ""], [5], ["x"] * 1025],
    "guided_grammar": [5, "start: nothing", "hello", "root ::= nothing"],
    "structured_outputs": [
        5,
        {"json": {"type": "x"}},
        {"regex": "("},
        {"whitespace_pattern": " "},
    ],
    "regex": [5, "("],
    "ebnf": [5, "root ::= nothing"],
    "json_schema": [5, "{", *BAD_SCHEMAS],
    "grammar": [5, "root ::= nothing"],
    "guided_decoding_backend": ["xgrammar"],
    "guided_whitespace_pattern": [" "],
}
COMPLETION = OPENAI | {
    "prompt": [
        *[5, 1.5, True, {}, [], "", [[]], [""], ["a", 5], [5, "a"], [None], [[1], "a"], [[[1]]]],
        *[[-1], [VOCABULARY], [1 << 31], [HUGE], [1.5], [True], [[1, True]], ["a"] * 1025],
        *[[5] * CONTEXT, "long " * CONTEXT, "x" * 1_000_000],
    ],
    "max_tokens": [*NOT_WHOLE, -2, 0, CONTEXT, 1 << 31],
    "echo": NOT_BOOLEANS,
    "logprobs": [*NOT_WHOLE, -1, 21],
    "best_of": [*NOT_WHOLE, 0, 129],
    "suffix": [5],
}
CHAT = OPENAI | {
    "messages": [
        *[5, "hi", {}, [], [5], ["hi"], [{}], [{"role": "user"}], [{"content": "hi"}]],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"a": 1}}],
        [{"role": "user", "content": None}],
        [{"role": "function", "content": "hi"}],
        [{"role": 5, "content": "hi"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": ["hi", 5]}],
        [{"role": "assistant", "tool_calls": 5}],
        [{"role": "assistant", "tool_calls": ["x"]}],
        [{"role": "assistant", "function_call": {"arguments": "{}"}}],
        [{"role": "user", "content": "long " * CONTEXT}],
    ],
    "max_tokens": [*NOT_WHOLE, -2, 0, CONTEXT, 1 << 31],
    "max_completion_tokens": [*NOT_WHOLE, -2, 0, CONTEXT, 1 << 31],
    "logprobs": [*NOT_BOOLEANS, 5],
    "top_logprobs": [*NOT_WHOLE, -1, 21, 1],
    "chat_template_kwargs": [
        5,
        "x",
        [5],
        {"messages": []},
        {"tools": []},
        {"thinking_budget": -1},
        {"add_generation_prompt": True},
    ],
    "add_generation_prompt": NOT_BOOLEANS,
    "tools": [
        *[5, [5], [{}], [{"type": "web_search"}], [{"type": "function", "function": {"name": ""}}]],
        *[[tool("f g")], [tool("f", strict="yes")], [tool("f"), tool("f")], [tool("f")] * 513],
        *[[tool("f", parameters={"type": "array"})]],
    ],
    "tool_choice": ["required", "any", {"type": "function"}, {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": NOT_BOOLEANS,
    "thinking_token_budget": [*NOT_WHOLE, -2],
    "include_reasoning": NOT_BOOLEANS,
    "functions": [5, [5], [{}], [{"name": "f g"}], [{"name": "f"}] * 2, [{"name": "f"}] * 513],
    "function_call": ["required", 5, {"name": "f"}],
    "modalities": [["audio"], ["text", "audio"]],
    "audio": [{"voice": "x"}],
    "reasoning_effort": ["some", 5],
    "web_search_options": [{}],
    "reasoning": [5, {"effort": "some"}, {"max_tokens": -1}, {"enabled": 1}, {"exclude": 1}],
}
PARAMETERS: dict[str, list[Any]] = {
    "do_sample": NOT_BOOLEANS,
    "temperature": [*NOT_NUMBERS, 0, -1, 2.01],
    "top_p": [*NOT_NUMBERS, 0, 1.01],
    "top_k": [*NOT_INTEGERS, 0, -2],
    "presence_penalty": [*NOT_NUMBERS, -0.1, 2.1],
    "frequency_penalty": [*NOT_NUMBERS, -0.1, 2.1],
    "repetition_penalty": [*NOT_NUMBERS, 0.9, 101],
    "max_new_tokens": [*NOT_INTEGERS, 0, -1, CONTEXT],
    "min_new_tokens": [*NOT_INTEGERS, 0, 17],
    "ignore_eos": NOT_BOOLEANS,
    "stop_sequences": [5, [""], [5], [[1, 2]], [[]], ["x"] * 17, [[VOCABULARY]]],
    "skip_special_tokens": NOT_BOOLEANS,
    "return_details": NOT_BOOLEANS,
    "n": [*NOT_INTEGERS, 0, 129],
    "best_of": [2, 0],
    "seed": [*NOT_INTEGERS, INT64],
    "print_eos_token": [True],
    "input_penalty": [True],
    "add_special_tokens": [False],
    "exponential_decay_length_penalty": [[5, 1.1]],
    "regular_constraint": [5, "("],
    "guided_grammar": [5, "root ::= x"],
    "guided_json": [5, {"type": "x"}],
    "allowed_token_ids": [[5]],
}

# Where another field is to blame, or the value of one shows in another: what the message must name instead.
NAMED_INSTEAD = {"max_new_tokens": "min_new_tokens|max_new_tokens"}


@pytest.fixture(scope="module", autouse=True)
def _none_reaches_the_engine(server: HttpServer) -> Iterator[None]:
    yield
    assert server.requests == [], "a refused request reached the engine"


def refused(response: httpx.Response, name: str, value: Any) -> dict[str, Any]:
    what = f"{name}={str(value)[:60]}"
    assert response.status_code in (400, 404), f"{what}: {response.status_code} {response.text[:200]}"
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}, what
    assert re.search(NAMED_INSTEAD.get(name, name), error["message"]), f"{what}: {error['message']}"
    assert len(error["message"]) < 500, what
    return error


@pytest.mark.parametrize("name", COMPLETION)
def test_completion_field(client: httpx.Client, name: str) -> None:
    for value in COMPLETION[name]:
        body = {"prompt": "Hi", "max_tokens": 1, name: value}
        refused(client.post("/v1/completions", json=body), name, value)


@pytest.mark.parametrize("name", CHAT)
def test_chat_field(client: httpx.Client, name: str) -> None:
    for value in CHAT[name]:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        if name == "max_completion_tokens":
            del body["max_tokens"]
        refused(client.post("/v1/chat/completions", json=body | {name: value}), name, value)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_generate_parameter(client: httpx.Client, path: str, name: str) -> None:
    for value in PARAMETERS[name]:
        refused(client.post(path, json={"inputs": "Hi", "parameters": {name: value}}), name, value)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/generate", {"parameters": {}}, "inputs"),
        ("/generate", {"inputs": 5}, "inputs"),
        ("/generate", {"inputs": ""}, "inputs"),
        ("/generate", {"inputs": "long " * CONTEXT}, "inputs"),
        ("/generate", {"inputs": "Hi", "parameters": 5}, "parameters"),
        ("/generate", {"inputs": "Hi", "multimodal_params": {"images": []}}, "multimodal_params"),
        ("/generate_stream", {"inputs": "Hi", "parameters": {"n": 2}}, "parameters.n"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"content": ["a"]}, "content"),
        ("/tokenize", {"content": "a", "with_pieces": 1}, "with_pieces"),
        ("/tokenize", {"content": "a", "add_special": 1}, "add_special"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCABULARY]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ],
)
def test_native_field(client: httpx.Client, path: str, body: dict[str, Any], name: str) -> None:
    refused(client.post(path, json=body), name, body)


def test_a_message_names_field_value_and_range(client: httpx.Client) -> None:
    error = client.post("/v1/completions", json={"prompt": "Hi", "temperature": 3.5}).json()["error"]
    assert error["param"] == "temperature"
    assert error["code"] == "invalid_value"
    for part in ("temperature", "0 to 2", "3.5"):
        assert part in error["message"]
    body = {"inputs": "Hi", "parameters": {"n": 1000}}
    assert "parameters.n: " in (message := client.post("/generate", json=body).json()["error"]["message"])
    assert "1 to 128" in message


def test_codes_tell_unsupported_from_missing(client: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for body, code in (
        (chat | {"web_search_options": {}}, "unsupported_parameter"),
        (chat | {"guided_regex": "("}, "invalid_grammar"),
        ({}, "missing_parameter"),
    ):
        assert client.post("/v1/chat/completions", json=body).json()["error"]["code"] == code


def test_what_can_never_fit_names_the_numbers(client: httpx.Client) -> None:
    body = {"prompt": [5] * 500, "max_tokens": 13}
    error = refused(client.post("/v1/completions", json=body), "prompt", 500)
    assert error["code"] == "context_length_exceeded"
    for number in ("512", "500", "13"):
        assert number in error["message"]


def test_more_choices_than_the_server_can_queue(client: httpx.Client) -> None:
    refused(
        client.post("/v1/completions", json={"prompt": ["a"] * 1024, "n": 128, "max_tokens": 1}), "n", 128
    )


def test_unknown_model_is_a_404_naming_the_served_one(client: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        response = client.post(path, json=body | {"model": "other"})
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["code"] == "model_not_found"
        assert NAME in error["message"]
        assert "other" in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        *[b"", b"{", b"[]", b"null", b'"text"', b"5", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 200_000],
        *[b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}'],
    ],
)
def test_bodies_that_are_no_request(client: httpx.Client, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_deep_json_in_free_fields(client: httpx.Client) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"a": deep}
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "chat_template_kwargs": deep}
    refused(client.post("/v1/chat/completions", json=body), "chat_template_kwargs", "deep")
    body = {"messages": messages, "guided_json": deep}
    refused(client.post("/v1/chat/completions", json=body), "guided_json", "deep")


def test_fields_that_disagree_with_a_grammar(client: httpx.Client) -> None:
    """And with one another."""
    call = {"tools": [tool("f")], "tool_choice": "required"}
    for path, extra, name in (
        ("completions", {"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ("completions", {"guided_regex": "a", "min_tokens": 1}, "min_tokens"),
        ("completions", {"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ("completions", {"guided_regex": "a", "structured_outputs": {"json": {}}}, "structured_outputs"),
        ("completions", {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ("chat/completions", call | {"ignore_eos": True}, "ignore_eos"),
        ("chat/completions", call | {"guided_regex": "a"}, "guided_regex"),
        ("chat/completions", {"tools": [tool("f")], "guided_choice": ["a"]}, "guided_choice"),
        (
            "chat/completions",
            {"reasoning_effort": "low", "thinking_token_budget": 5},
            r"reasoning tokens: reasoning_effort \(1024\), thinking_token_budget \(5\); send one",
        ),
        (
            "chat/completions",
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "enable_thinking",
        ),
    ):
        body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "max_tokens": 1} | extra
        del body["prompt" if path == "chat/completions" else "messages"]
        refused(client.post(f"/v1/{path}", json=body), name, extra)


def test_template_errors_are_the_clients(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": {"namespace": 5}}
    error = refused(client.post("/v1/chat/completions", json=body), "messages", body)
    assert error["code"] == "chat_template_error"


def test_the_message_about_a_part_or_a_length(client: httpx.Client) -> None:
    def message(path: str, **body: Any) -> str:
        error = client.post(path, json={"max_tokens": 1} | body).json()["error"]
        return str(error["message"])

    chat, sound = "/v1/chat/completions", {"type": "input_audio", "input_audio": {"data": "x"}}
    assert message(chat, messages=[{"role": "user", "content": [sound]}]) == (
        "messages.0.content: a part of the type 'input_audio' is not supported, only texts, files, pictures and "
        'videos are: {"type": "text", "text": "..."}'
    )
    assert message(chat, messages=[]) == "messages: must have at least 1 item, not 0"
    hi = [{"role": "user", "content": "Hi"}]
    assert message(chat, messages=hi, tool_choice={"type": "allowed_tools"}).startswith(
        "tool_choice: must be 'none', 'auto' or 'required'"
    )
    block = {"type": "video", "source": {"type": "url", "url": "x"}}
    anthropic = [{"role": "user", "content": [block]}]
    assert message("/v1/messages", model=NAME, messages=anthropic) == (
        "messages.0.user.content.0: the type 'video' is not supported; supported are 'text', 'image', "
        "'document', 'search_result', 'tool_result'"
    )
