"""docs/reference/compatibility/ is true: every endpoint and field of it is sent to the real process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from pydantic.fields import FieldInfo

from moeserve.httpserver.anthropic.bodies import CountTokensRequest, MessagesRequest
from moeserve.httpserver.generation.request.sampling_fields import declared_for
from moeserve.httpserver.llama_server.bodies import CompletionBody
from moeserve.httpserver.native.bodies import DetokenizeRequest, TokenizeRequest
from moeserve.httpserver.ollama.bodies import ChatBody, GenerateBody, Options
from moeserve.httpserver.openai.chat_body import ChatCompletionRequest
from moeserve.httpserver.openai.completion_body import CompletionRequest
from moeserve.httpserver.responses.bodies import ResponsesRequest
from moeserve.httpserver.transport.request_model import Advisory, RequestModel, Unsupported
from tests.support.servers.http_harness import NAME, TLS, HttpServer

FOLDER = Path(__file__).parents[3] / "docs" / "reference" / "compatibility"
PAGES = "".join(page.read_text() for page in sorted(FOLDER.glob("*.md")))
HI: Any = [{"role": "user", "content": "Hi"}]
REQUESTS: dict[str, tuple[type[RequestModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": HI, "max_tokens": 1}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi", "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, {"model": NAME, "messages": HI, "max_tokens": 1}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"model": NAME, "messages": HI}),
    "/api/chat": (ChatBody, {"model": NAME, "messages": HI, "options": {"num_predict": 1}}),
    "/api/generate": (GenerateBody, {"model": NAME, "prompt": "Hi", "options": {"num_predict": 1}}),
    "/completion": (CompletionBody, {"prompt": "Hi", "n_predict": 1}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
TOOL: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
FLAT_TOOL: Any = {"type": "function", "name": "now", "parameters": {"type": "object"}}
THEIR_TOOL: Any = {"name": "now", "input_schema": {"type": "object"}}
SCHEMA: Any = {"type": "object", "properties": {}, "additionalProperties": False}
# A value for each supported or accepted field; with "field": {"field": ..., ...} it needs what stands beside it.
VALUES: dict[str, Any] = {
    "images": [],  # this server has no tower
    "suffix": "",  # nor tokens for fill-in-the-middle (test_infill)
    "n_indent": 4,
    "t_max_predict_ms": 500,
    "response_fields": ["content"],
    "add_generation_prompt": True,
    "background": True,
    "add_special": True,
    "add_special_tokens": False,
    "allowed_token_ids": [7, 8],
    "bad_words": [" the"],
    "beam_width": {"beam_width": 3, "use_beam_search": True},
    "best_of": {"best_of": 3, "n": 2},
    "cache_control": {"type": "ephemeral"},
    "cache_salt": "salt",
    "chat_template_kwargs": {"enable_thinking": False},
    "client_metadata": {"a": "b"},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "continue_final_message": {
        "continue_final_message": True,
        "messages": [*HI, {"role": "assistant", "content": "Well"}],
    },
    "content": "Hi",
    "dry_sequence_breakers": ["\n", "User:"],
    "diversity_penalty": {
        "diversity_penalty": 0.5,
        "use_beam_search": True,
        "beam_width": 4,
        "num_beam_groups": 2,
    },
    "early_stopping": {"early_stopping": "never", "use_beam_search": True},
    "ebnf": 'root ::= "yes"',
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": {"function_call": "auto", "functions": [TOOL["function"]]},
    "functions": [TOOL["function"]],
    "grammar": 'root ::= "yes"',
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'root ::= "yes"',
    "guided_json": SCHEMA,
    "guided_regex": "[0-9]+",
    "ignore_eos": True,
    "include": ["reasoning.encrypted_content"],
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "input": "Hi",
    "inference_geo": "eu",
    "instructions": "Be brief.",
    "json_schema": SCHEMA,
    "length_penalty": {"length_penalty": 0.5, "use_beam_search": True},
    "logit_bias": {"7": 1.5},
    "logprobs": True,
    "max_completion_tokens": {"max_completion_tokens": 2, "max_tokens": None},
    "max_output_tokens": 2,
    "max_tool_calls": 3,
    "max_tokens": 2,
    "messages": HI,
    "metadata": {"a": "b"},
    "min_p": 0.1,
    "min_tokens": 1,
    "model": NAME,
    "n": 2,
    "n_predict": 2,
    "n_probs": 2,
    "no_stop_trim": True,
    "output_config": {"effort": "low"},
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
    "num_beam_groups": {"num_beam_groups": 2, "use_beam_search": True, "beam_width": 2},
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "Hi"},
    "presence_penalty": 0.5,
    "priority": 1,
    "prompt": "Hi",
    "prompt_cache_key": "key",
    "prompt_logprobs": 1,
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "regex": "[0-9]+",
    "repeat_last_n": 64,
    "repeat_penalty": 1.1,
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "return_progress": {"return_progress": True, "stream": True},
    "return_token_ids": True,
    "return_token_strs": True,
    "return_tokens": True,
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 1},
    "safety_identifier": "me",
    "samplers": ["top_k", "temperature"],
    "seed": 7,
    "separate_reasoning": False,
    "service_tier": "auto",
    "skip_special_tokens": False,
    "stop": ["x"],
    "stop_sequences": ["x"],
    "stop_token_ids": [7],
    "store": False,
    "stream": True,
    "stream_options": {"stream_options": {"include_usage": True}, "stream": True},
    "structured_outputs": {"regex": "[0-9]+"},
    "system": "Be brief.",
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "thinking": {"type": "adaptive"},
    "thinking_token_budget": 16,
    "timings_per_token": True,
    "tokens": [1, 2],
    "tool_choice": {"tool_choice": "auto", "tools": [TOOL]},
    "tools": [TOOL],
    "top_k": 5,
    "top_logprobs": {"top_logprobs": 2, "logprobs": True},
    "top_p": 0.9,
    "truncate_prompt_tokens": 4,
    "truncation": "auto",
    "use_beam_search": True,
    "user": "me",
    "with_pieces": True,
    "enable_thinking": False,
    "format": "json",
    "keep_alive": -1,
    "options": {"top_k": 5},
    "raw": True,
    "think": False,
}
# Where a field is another thing than elsewhere.
THERE: dict[tuple[str, str], Any] = {
    ("/v1/completions", "logprobs"): 2,
    ("/v1/completions", "return_tokens_as_token_ids"): {"return_tokens_as_token_ids": True, "logprobs": 1},
    ("/v1/responses", "stream_options"): {"stream_options": {"include_obfuscation": False}, "stream": True},
    ("/v1/chat/completions", "thinking"): {"type": "disabled"},
    ("/v1/responses", "tools"): [FLAT_TOOL],
    ("/v1/responses", "tool_choice"): {"tool_choice": "auto", "tools": [FLAT_TOOL]},
    ("/v1/responses", "top_logprobs"): 2,
    ("/api/chat", "logprobs"): True,
    ("/api/generate", "logprobs"): True,
    **{(path, "tools"): [THEIR_TOOL] for path in ("/v1/messages", "/v1/messages/count_tokens")},
    **{
        (path, "tool_choice"): {"tool_choice": {"type": "auto"}, "tools": [THEIR_TOOL]}
        for path in ("/v1/messages", "/v1/messages/count_tokens")
    },
}
# What stands in place of the field that the smallest request has.
_MESSAGES: Final = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt")
INSTEAD: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    **{("/tokenize", name): ("prompt", {"messages": HI}) for name in _MESSAGES},
    **{("/tokenize", name): ("prompt", {"content": "Hi"}) for name in ("content", "add_special")},
}
# None of them is what a refused field takes by exception.
SOMETHING: list[Any] = [3, 2.5, "some text", ["a", "b"], {"a": {"b": 1}}]


def declared_of(model: type[RequestModel]) -> list[str]:
    """The sampling parameters that the model has: docs/reference/sampling-parameters.md lists them, not these pages."""
    api = getattr(model, "sampling_api", None)
    return [] if api is None else [of.name_in(api, name) for name, of in declared_for(api).items()]


def section(title: str) -> list[tuple[str, str]]:
    """(name, status) of each row of the table under the title."""
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^##? |\Z)", PAGES, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `([^`]+)` (?:\|.*?)?\| (supported|refused|accepted) \|", text, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| `", text, re.MULTILINE)), "a row without a status"
    return rows


def statuses_of(model: type[RequestModel]) -> dict[str, str]:
    """What the code says of each field that it knows."""
    known = dict.fromkeys(model.unsupported_fields, "refused") | dict.fromkeys(model.idle, "accepted")
    for name, info in fields_of(model).items():
        idle = any(isinstance(one, Advisory) for one in info.metadata)
        known[name] = "accepted" if idle else "refused" if is_unsupported(info) else "supported"
    return known


def is_unsupported(info: FieldInfo) -> bool:
    return any(isinstance(one, Unsupported) for one in info.metadata)


def fields_of(model: type[RequestModel]) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in model.model_fields.items()}


@pytest.mark.parametrize("path", REQUESTS)
def test_every_field_is_listed_with_what_it_is(path: str) -> None:
    rows = section(f"`POST {path}`")
    names = [name for name, _ in rows]
    assert len(names) == len(set(names))
    known = statuses_of(REQUESTS[path][0])
    listed_elsewhere = {name: known[name] for name in declared_of(REQUESTS[path][0])}
    assert listed_elsewhere | dict(rows) == known


def body_with(path: str, name: str, server: HttpServer) -> dict[str, Any]:
    """The smallest request that has the field."""
    body = dict(REQUESTS[path][1])
    if (path, name) in INSTEAD:
        replaced, instead = INSTEAD[path, name]
        del body[replaced]
        body |= instead
    if name == "previous_response_id":
        return body | {name: server.post(path, body).json()["id"]}
    if name in REQUESTS[path][0].idle:
        return body | {name: {"any": ["thing"]}}
    value = THERE.get((path, name)) or VALUES[name]
    return body | (value if isinstance(value, dict) and name in value else {name: value})


def test_ollamas_options_are_listed() -> None:
    known = statuses_of(Options)
    own = {name: status for name, status in known.items() if name not in declared_of(Options)}
    assert dict(section("`options` of both")) == own


@pytest.mark.parametrize("path", REQUESTS)
def test_supported_and_accepted_fields_are_taken(server: HttpServer, path: str) -> None:
    bodies = {
        name: body_with(path, name, server)
        for name, status in section(f"`POST {path}`")
        if status != "refused"
    }
    bodies |= {name: REQUESTS[path][1] | {name: 1} for name in declared_of(REQUESTS[path][0])}
    for name, body in bodies.items():
        response = server.post(path, body)
        assert response.status_code == 200, f"{name}: {response.text}"
        assert "event: error" not in response.text


@pytest.mark.parametrize("path", REQUESTS)
def test_refused_fields_are_refused_by_name(server: HttpServer, path: str) -> None:
    server.requests.clear()
    client = httpx.Client(base_url=server.url, timeout=30)
    for name, status in section(f"`POST {path}`"):
        if status != "refused":
            continue
        for value in SOMETHING:
            response = client.post(path, json=REQUESTS[path][1] | {name: value})
            assert response.status_code == 400, f"{name}={value}: {response.status_code}"
            error = response.json()["error"]
            assert name in (error if isinstance(error, str) else error["message"])  # Ollama's are texts
    assert server.requests == []


def test_endpoints_are_there_or_not(server: HttpServer) -> None:
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    there = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    rows = section("Endpoints") + section("Administration")
    assert len({name for name, _ in rows}) == len(rows)
    assert {name for name, status in rows if status == "supported"} == there | {"GET /openapi.json"}
    for name, status in rows:
        method, path = name.split()
        if status == "refused":
            response = httpx.request(method, server.url + re.sub(r"{\w+}", "x", path), json={}, verify=TLS)
            assert response.status_code in (404, 405), name
