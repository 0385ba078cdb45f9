"""Ollama's API: lines of JSON, calls, thoughts, formats, options; and the lists that its clients ask for."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from gguf.constants import LlamaFileType

from moeserve.models.facts import FILE_TYPES, ModelFacts
from tests.support.chats.scripted_answers import ANSWER, MESSAGES, PARIS, TOOLS, prompt_of
from tests.support.servers.engine_messages import CONTEXT
from tests.support.servers.fresh_server import as_new
from tests.support.servers.http_harness import NAME, TLS, HttpServer, echo, say, silence, tokens_of

CHAT: Any = {"model": NAME, "messages": MESSAGES}


_as_new = as_new(say(*ANSWER))


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_whole_and_streamed(server: HttpServer) -> None:
    whole = server.post("/api/chat", CHAT | {"tools": TOOLS, "stream": False}).json()
    message = whole["message"]
    assert (message["role"], message["content"].strip()) == ("assistant", "Here you are.")
    assert message["thinking"].strip() == "Let me see."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "now"]
    assert message["tool_calls"][0]["function"]["arguments"] == PARIS
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    assert whole["eval_count"] == len(ANSWER)
    assert whole["prompt_eval_duration"] == 2_000_000
    streamed = lines(server.post("/api/chat", CHAT | {"tools": TOOLS}))
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    for part in ("content", "thinking"):
        assert "".join(line["message"].get(part, "") for line in streamed) == message[part]
    calls = [call for line in streamed for call in line["message"].get("tool_calls", [])]
    assert [call["function"] for call in calls] == [call["function"] for call in message["tool_calls"]]
    # The next turn.
    result = {"role": "tool", "tool_name": "weather", "content": "Rain."}
    body = {"model": f"{NAME}:latest", "messages": [*MESSAGES, message, result], "tools": TOOLS}
    assert server.post("/api/chat", body).status_code == 200
    prompt = prompt_of(server)
    assert '{"name": "weather", "arguments": {"city": "Paris"}}' in prompt
    assert "<tool_response>\nRain.\n</tool_response>" in prompt


def test_generate_with_a_template_and_raw(server: HttpServer) -> None:
    server.answer = say("A", " fox.")
    body = {"model": NAME, "prompt": "Who?", "system": "Be brief."}
    streamed = lines(server.post("/api/generate", body))
    assert "".join(line["response"] for line in streamed) == "A fox."
    assert prompt_of(server).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?")
    raw = server.post("/api/generate", body | {"raw": True, "stream": False}).json()
    assert (raw["response"], raw["done"]) == ("A fox.", True)
    assert prompt_of(server) == "Who?"


def test_options_formats_and_thinking(server: HttpServer) -> None:
    server.answer = say("{}")
    options = {
        "temperature": 0.5,
        "top_k": 5,
        "num_predict": 7,
        "seed": 3,
        "stop": ["x"],
        "repeat_penalty": 1.2,
    }
    load = {"num_ctx": 4096, "num_gpu": 99, "typical_p": 1.0, "mirostat": 0}
    body = CHAT | {"stream": False, "keep_alive": "5m", "think": False}
    assert server.post("/api/chat", body | {"options": options | load, "format": "json"}).status_code == 200
    request = server.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.seed) == (0.5, 5, 7, 3)
    assert (sampling.repetition_penalty, request.text.stop) == (1.2, ("x",))
    assert sampling.grammar
    assert prompt_of(server).endswith("<think>\n\n</think>\n\n")
    schema = {"type": "object", "properties": {"unlike": {"type": "string"}}}
    assert server.post("/api/chat", body | {"format": schema}).status_code == 200
    assert "unlike" in server.requests[-1].sampling.grammar


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/completion"])
def test_bounds_are_those_of_the_api(server: HttpServer, path: str) -> None:
    """An answer's bound beyond the context means its end, and there may be a stop string for every speaker."""
    asked = {"stop": [f"\nName{number}:" for number in range(24)]}
    if path == "/completion":
        body: dict[str, Any] = {"prompt": "x", "n_predict": 10**6, **asked}
    else:
        body = {"model": NAME, "stream": False, "options": {"num_predict": 10**6, **asked}}
        body |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    server.answer = say("Fine.")
    assert server.post(path, body).status_code == 200
    (request,) = server.requests
    assert len(request.text.stop) == 24
    assert request.sampling.max_tokens == CONTEXT - len(tokens_of(request))


def test_an_empty_conversation_loads_the_model(server: HttpServer) -> None:
    for path, body in (("/api/chat", {"model": NAME}), ("/api/generate", {"model": NAME})):
        (line,) = lines(server.post(path, body))
        assert (line["done"], line["done_reason"]) == (True, "load")
    assert server.requests == []


def test_errors_are_a_text(server: HttpServer) -> None:
    for body, status, part in (
        ({"model": "other", "messages": MESSAGES}, 404, "other"),
        (CHAT | {"options": {"repeat_penalty": 0}}, 400, "options.repeat_penalty"),
        (CHAT | {"messages": [MESSAGES[0] | {"images": ["x"]}]}, 400, "images"),
        ({}, 400, "model"),
    ):
        refused = server.post("/api/chat", body)
        assert refused.status_code == status
        assert part in refused.json()["error"]


def test_a_stream_that_waits_has_its_head_and_blanks(server: HttpServer) -> None:
    server.answer = silence
    with (
        httpx.Client(base_url=server.url, timeout=60, verify=TLS) as client,
        client.stream("POST", "/api/chat", json=CHAT) as response,
    ):
        assert response.status_code == 200  # nothing was answered yet
        echo(server, server.requests[-1])
        lines = [*response.iter_lines()]
    assert lines[0].startswith(" {"), "a proxy has seen bytes"
    assert not any(line.startswith(" ") for line in lines[1:])
    assert all(json.loads(line)["model"] for line in lines)


def test_the_lists_of_models(server: HttpServer) -> None:
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": "qwen3moe",
        "families": ["qwen3moe"],
        "parameter_size": "8.0M",
        "quantization_level": "Q4_K_M",
    }
    for path in ("/api/tags", "/api/ps"):
        (model,) = server.get(path).json()["models"]
        assert (model["name"], model["details"]) == (NAME, details)
        assert model["size"] > 0
    assert model["context_length"] == CONTEXT
    assert model["expires_at"] > "2300"
    assert model["size_vram"] == 0
    shown = server.post("/api/show", {"model": NAME}).json()
    assert set(shown["capabilities"]) == {"completion", "tools", "thinking"}
    assert "im_start" in shown["template"]
    assert shown["details"] == details
    assert shown["model_info"]["general.architecture"] == "qwen3moe"
    assert shown["model_info"]["qwen3moe.context_length"] == CONTEXT
    assert shown["model_info"]["general.parameter_count"] > 7_000_000
    assert server.get("/api/version").json()["version"]
    assert server.post("/api/show", {"name": "other"}).status_code == 404


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("top", [0, 2])
def test_logprobs(server: HttpServer, path: str, top: int) -> None:
    body = {"model": NAME, "messages": MESSAGES, "prompt": "Hi", "logprobs": True, "top_logprobs": top}
    for stream in (False, True):
        answer = server.post(path, body | {"stream": stream})
        found = [one for line in lines_of(answer) for one in line.get("logprobs", [])]
        assert server.requests[-1].sampling.logprobs == top
        assert len(found) == len(ANSWER)
        assert all(one["logprob"] <= 0 for one in found)
        assert [len(one.get("top_logprobs", [])) for one in found] == [top] * len(ANSWER)
    assert "logprobs" not in server.post(path, body | {"stream": False, "logprobs": False}).json()


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_names_of_file_types_are_llama_cpps() -> None:
    names = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
    assert names.items() >= {n: name for n, name in FILE_TYPES.items() if n in names}.items()


@pytest.mark.parametrize(("count", "size"), [(30_532_122_624, "30.5B"), (7_240_000, "7.2M"), (900, "900")])
def test_sizes_for_people(count: int, size: str) -> None:
    assert ModelFacts("", count).size == size
