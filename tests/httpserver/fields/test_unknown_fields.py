"""Fields that no request model declares, in every kind of object: dropped and told, or refused, as --unknown-fields
says; and values that ask for nothing, which every server takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.servers.http_harness import NAME, HttpServer, http_server

HI: Any = [{"role": "user", "content": "Hi"}]
CHAT: Any = {"messages": HI, "max_tokens": 1}
THEIRS: Any = {"model": NAME, "messages": HI, "max_tokens": 1}
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "generate": "/generate",
    "tokenize": "/tokenize",
}
FUNCTION: Any = {"name": "f", "parameters": {"type": "object"}}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PART: Any = {"type": "text", "text": "hi"}
# (API, body, the field as the log names it)
UNKNOWN: list[tuple[str, Any, str]] = [
    ("chat", CHAT | {"no_such": [1]}, "no_such"),
    ("chat", {"messages": [HI[0] | {"no_such": 1}]}, "messages[].no_such"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [PART | {"no_such": 1}]}]},
        "messages[].content[].no_such",
    ),
    ("chat", CHAT | {"stream": True, "stream_options": {"no_such": True}}, "stream_options.no_such"),
    ("chat", CHAT | {"tools": [{"type": "function", "no_such": 1, "function": FUNCTION}]}, "tools[].no_such"),
    (
        "chat",
        CHAT | {"tools": [{"type": "function", "function": FUNCTION | {"no_such": 1}}]},
        "tools[].function.no_such",
    ),
    (
        "chat",
        {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL | {"no_such": 1}]}, *HI]},
        "messages[].tool_calls[].no_such",
    ),
    ("chat", CHAT | {"response_format": {"type": "json_object", "no_such": 1}}, "response_format.no_such"),
    ("completions", {"prompt": "Hi", "max_tokens": 1, "no_such": "x"}, "no_such"),
    ("completions", {"prompt": "Hi", "structured_outputs": {"no_such": 1}}, "structured_outputs.no_such"),
    ("responses", {"input": "Hi", "no_such": 1}, "no_such"),
    ("responses", {"input": [HI[0] | {"no_such": 1}]}, "input[].no_such"),
    (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "no_such": 1}]}]},
        "input[].content[].no_such",
    ),
    (
        "responses",
        {"input": "Hi", "tools": [{"type": "function", "name": "f", "no_such": 1}]},
        "tools[].no_such",
    ),
    ("responses", {"input": "Hi", "reasoning": {"no_such": 1}}, "reasoning.no_such"),
    ("responses", {"input": "Hi", "text": {"no_such": 1}}, "text.no_such"),
    (
        "responses",
        {"input": "Hi", "stream": True, "stream_options": {"no_such": 1}},
        "stream_options.no_such",
    ),
    ("messages", THEIRS | {"no_such": 1}, "no_such"),
    (
        "messages",
        THEIRS | {"messages": [{"role": "user", "content": [PART | {"no_such": 1}]}]},
        "messages[].content[].no_such",
    ),
    (
        "messages",
        THEIRS | {"tools": [{"name": "f", "input_schema": {"type": "object"}, "no_such": 1}]},
        "tools[].no_such",
    ),
    ("generate", {"inputs": "Hi", "parameters": {"no_such": 1}}, "parameters.no_such"),
    ("tokenize", {"prompt": "Hi", "no_such": 1}, "no_such"),
]
NOTHING: list[tuple[str, dict[str, Any]]] = [
    ("best_of", {"best_of": 1}),
    ("no stop", {"stop": ""}),
    ("no stops", {"stop": ["", ""]}),
    ("beam search", {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}),
    ("echo", {"echo": False}),
    ("prefill", {"continue_final_message": False}),
    (
        "sampling",
        {"priority": 0, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "typical_p": 1.0, "mirostat": 0},
    ),
    (
        "llama-server",
        {"cache_prompt": True, "id_slot": -1, "repeat_penalty": 1.0, "n_probs": 0, "dry_multiplier": 0},
    ),
    (
        "samplers",
        {"samplers": [], "dry_sequence_breakers": [], "xtc_threshold": 0.2, "timings_per_token": True},
    ),
    (
        "sglang",
        {
            "no_stop_trim": False,
            "separate_reasoning": True,
            "stream_reasoning": True,
            "return_hidden_states": False,
        },
    ),
    ("vllm", {"spaces_between_special_tokens": True, "logits_processors": [], "documents": []}),
    ("openai", {"verbosity": "low", "cache_control": {"type": "ephemeral"}, "store": False, "functions": []}),
]
# Fields without effect, with a value that they cannot have.
UNREADABLE: list[tuple[str, Any, str]] = [
    ("chat", CHAT | {"user": 5}, "user"),
    ("chat", CHAT | {"metadata": "x"}, "metadata"),
    ("chat", CHAT | {"store": "yes"}, "store"),
    ("chat", CHAT | {"service_tier": ["auto"]}, "service_tier"),
    ("chat", CHAT | {"prediction": ["x"]}, "prediction"),
    ("chat", {"messages": [HI[0] | {"refusal": False}]}, "messages[].refusal"),
    (
        "chat",
        CHAT | {"stream": True, "stream_options": {"include_obfuscation": "no"}},
        "stream_options.include_obfuscation",
    ),
    (
        "chat",
        {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL | {"index": "0"}]}, *HI]},
        "messages[].tool_calls[].index",
    ),
    ("completions", {"prompt": "Hi", "max_tokens": 1, "user": {"id": 1}}, "user"),
    ("responses", {"input": "Hi", "user": 5}, "user"),
    ("responses", {"input": "Hi", "max_tool_calls": 0}, "max_tool_calls"),
    ("responses", {"input": [HI[0] | {"status": "sent"}]}, "input[].status"),
    ("messages", THEIRS | {"metadata": "x"}, "metadata"),
    ("messages", THEIRS | {"service_tier": "flex"}, "service_tier"),
    (
        "messages",
        THEIRS | {"messages": [{"role": "user", "content": [PART | {"cache_control": "yes"}]}]},
        "messages[].content[].cache_control",
    ),
]
EMPTY: dict[str, list[str]] = {
    "chat": [
        *(
            "logit_bias",
            "metadata",
            "modalities",
            "response_format",
            "stream_options",
            "chat_template_kwargs",
        ),
        *("tools", "tool_choice", "functions", "stop", "bad_words", "user", "reasoning", "documents", "lora"),
        *("structured_outputs", "guided_regex", "grammar", "input_ids", "chat_template", "audio"),
    ],
    "completions": [
        "logit_bias",
        "metadata",
        "stream_options",
        "response_format",
        "stop",
        "kv_transfer_params",
    ],
    "responses": [
        *("metadata", "tools", "tool_choice", "text", "reasoning", "include", "stream_options", "logit_bias"),
        *("chat_template_kwargs", "previous_response_id", "conversation", "prompt", "context_management"),
    ],
    "messages": [
        *(
            "metadata",
            "tools",
            "tool_choice",
            "system",
            "stop_sequences",
            "thinking",
            "mcp_servers",
            "container",
        ),
        *("context_management", "output_config", "chat_template_kwargs"),
    ],
}
SMALLEST: dict[str, Any] = {
    "chat": CHAT,
    "completions": {"prompt": "Hi", "max_tokens": 1},
    "responses": {"input": "Hi", "max_output_tokens": 1},
    "messages": THEIRS,
}


@pytest.fixture(scope="module")
def strict() -> Iterator[HttpServer]:
    with http_server(unknown_fields="error") as running:
        yield running


def counted(server: HttpServer, path: str) -> float:
    labels = f'{{handler="{path}",model_name="{NAME}"}}'
    return server.metrics().get("moeserve:unknown_request_fields_total" + labels, 0)


@pytest.mark.parametrize(("api", "body", "field"), UNKNOWN, ids=[f"{one[0]} {one[2]}" for one in UNKNOWN])
def test_an_unknown_field_is_ignored_and_counted_or_refused(
    server: HttpServer, strict: HttpServer, api: str, body: Any, field: str
) -> None:
    path = PATHS[api]
    before = counted(server, path)
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert counted(server, path) == before + 1
    assert "x-moeserve-ignored-fields" not in answer.headers
    refused = strict.post(path, body)
    assert refused.status_code == 400
    assert "no_such" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("api", "body", "field"), UNREADABLE, ids=[f"{one[0]} {one[2]}" for one in UNREADABLE]
)
def test_an_unreadable_value_without_effect_is_ignored_and_counted_or_refused(
    server: HttpServer, strict: HttpServer, api: str, body: Any, field: str
) -> None:
    path = PATHS[api]
    before = counted(server, path)
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert counted(server, path) == before + 1
    refused = strict.post(path, body)
    assert refused.status_code == 400
    assert field.rpartition(".")[2] in refused.json()["error"]["message"]


@pytest.mark.parametrize("api", EMPTY)
@pytest.mark.parametrize("empty", [[], {}, ""], ids=["list", "object", "text"])
def test_an_empty_value_asks_for_nothing(strict: HttpServer, api: str, empty: Any) -> None:
    for name in EMPTY[api]:
        answer = strict.post(PATHS[api], SMALLEST[api] | {name: empty})
        assert answer.status_code == 200, f"{name}: {answer.text}"


def test_an_empty_value_that_asks_for_something_is_refused(server: HttpServer) -> None:
    for name, value in {"guided_choice": [], "temperature": "", "web_search_options": {}}.items():
        assert server.post(PATHS["chat"], CHAT | {name: value}).status_code == 400, name
    assert server.post(PATHS["messages"], THEIRS | {"thread": {}}).status_code == 400


def test_an_empty_list_is_an_empty_object_of_parameters(strict: HttpServer) -> None:
    """PHP writes an empty object so."""
    tool = {"type": "function", "function": {"name": "f", "parameters": []}}
    answer = strict.post(PATHS["chat"], CHAT | {"tools": [tool]})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("choice", ["named", "without type", "allowed"])
def test_no_field_of_a_tool_choice_is_unknown(server: HttpServer, choice: str) -> None:
    """LangChain's structured output names the tool; the other form of the union has no such fields."""
    named: Any = {"type": "function", "function": {"name": "f"}}
    forms: dict[str, Any] = {
        "named": named,
        "without type": {"function": {"name": "f"}},
        "allowed": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}},
    }
    before = counted(server, PATHS["chat"])
    tools = [{"type": "function", "function": FUNCTION}]
    answer = server.post(PATHS["chat"], CHAT | {"tools": tools, "tool_choice": forms[choice]})
    assert answer.status_code == 200, answer.text
    assert counted(server, PATHS["chat"]) == before


@pytest.mark.parametrize(("what", "fields"), NOTHING, ids=[one[0] for one in NOTHING])
def test_what_asks_for_nothing_is_taken_by_a_strict_server_too(
    strict: HttpServer, what: str, fields: dict[str, Any]
) -> None:
    answer = strict.post("/v1/chat/completions", CHAT | fields)
    assert answer.status_code == 200, answer.text


def test_a_strict_server_says_that_there_is_no_such_field(strict: HttpServer) -> None:
    error = strict.post("/v1/chat/completions", CHAT | {"temprature": 1}).json()["error"]
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")


def test_what_earlier_answers_had_comes_back_without_harm(strict: HttpServer) -> None:
    answered = {
        "role": "assistant",
        "content": [PART | {"cache_control": {"type": "ephemeral"}}],
        "tool_calls": [CALL | {"function": CALL["function"] | {"parsed_arguments": {}}, "index": 0}],
        "parsed": {"a": 1},
        "annotations": [{"type": "url_citation"}],
        "reasoning_details": [{"type": "reasoning.text", "text": "Hm"}],
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm"}],
        "provider_specific_fields": {"x": 1},
        "refusal": None,
        "audio": None,
        "function_call": None,
    }
    result = {"role": "tool", "tool_call_id": "c", "content": "1", "cache_control": {"type": "ephemeral"}}
    answer = strict.post("/v1/chat/completions", {"messages": [*HI, answered, result], "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_the_log_names_a_field_once_with_the_client_and_a_hint(capfd: pytest.CaptureFixture[str]) -> None:
    with http_server() as server:
        for _ in range(2):
            body = CHAT | {"temprature": 1, "x\r\ny": 1, "user": 5}
            assert (
                server.post("/v1/chat/completions", body, headers={"user-agent": "agent/1.2"}).status_code
                == 200
            )
    log = capfd.readouterr().err
    assert log.count("did the client mean temperature?") == 1
    assert log.count("ignored the unknown field x??y, sent by 'agent/1.2'") == 1
    assert log.count("ignored the value of user, which cannot be read and would have no effect, sent by") == 1
    assert log.count(" WARNING ") == 3


def test_warn_tells_each_request_and_its_client(capfd: pytest.CaptureFixture[str]) -> None:
    with http_server(unknown_fields="warn") as server:
        for _ in range(2):
            body = {"messages": [HI[0] | {"b\r\nx-evil: 1": 1}], "a": 1, "max_tokens": 1}
            answer = server.post("/v1/chat/completions", body)
            assert set(answer.headers["x-moeserve-ignored-fields"].split(", ")) == {
                "a",
                "messages[].b??x-evil??1",
            }
    assert capfd.readouterr().err.count("/v1/chat/completions: ignored ") == 2


def test_every_wrong_field_is_named(server: HttpServer) -> None:
    body = CHAT | {"temperature": 9, "top_p": 9, "n": 0, "tool_choice": 5, "functions": [1]}
    error = server.post("/v1/chat/completions", body).json()["error"]
    for name in ("temperature: must", "top_p: must", "n: must", "tool_choice: must", "functions.0: "):
        assert name in error["message"]
    assert error["message"].count("tool_choice") == 1
    many = dict.fromkeys(("seed", "min_p", "top_k", "stream", "logprobs", "ignore_eos", "min_tokens"), "x")
    error = server.post("/v1/chat/completions", body | many).json()["error"]
    assert all(name in error["message"] for name in [*body.keys() - CHAT.keys(), *many])


def test_a_refusal_says_what_is_taken_and_what_to_use(server: HttpServer) -> None:
    error = server.post("/v1/chat/completions", CHAT | {"best_of": 3}).json()["error"]
    assert error["code"] == "unsupported_parameter"
    assert error["message"] == "best_of: is not supported (only 1 is accepted), got 3; use n"


def test_unknown_fields_without_end_are_bounded(server: HttpServer) -> None:
    names = {f"x{i}" * 300: 1 for i in range(200)}
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.post("/v1/chat/completions", json=CHAT | names).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/responses", {"input": "Hi"}, "web_search"),
        ("/v1/responses", {"input": "Hi"}, "some_newer_tool"),
        (
            "/v1/messages",
            {"model": NAME, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]},
            "web_search_20250305",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_hosted_tool_that_is_left_out_is_said(
    server: HttpServer, path: str, body: dict[str, Any], kind: str, stream: bool
) -> None:
    """Whatever --unknown-fields is: an answer without a search is another answer."""
    tool = {"type": kind, "name": "web_search"}
    answer = server.post(path, body | {"tools": [tool], "stream": stream, "no_such_field": 1})
    assert answer.status_code == 200
    assert answer.headers["x-moeserve-ignored-fields"] == f"tools[].type={kind}"
