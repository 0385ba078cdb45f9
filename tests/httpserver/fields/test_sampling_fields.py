"""vLLM's fields for the prompt and the tokens of an answer, answers that are begun, and a server's own defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.httpserver.generation.request.sampling_defaults import SamplingDefaults, sampling_defaults
from moeserve.messages.schema import ProcessFailed
from tests.support.chats.scripted_answers import prompt_of
from tests.support.servers.fresh_server import as_new
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say, tokens_of

HI: Any = [{"role": "user", "content": "Hi"}]
MESSAGES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEMPLATE = MESSAGES + "{% if add_generation_prompt %}[go]{% endif %}"


_as_new = as_new(None)


def asked(server: HttpServer, path: str, **body: Any) -> Any:
    response = server.post(path, {"max_tokens": 2} | body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(("path", "prompt"), [("/v1/completions", "Hi"), ("/v1/chat/completions", HI)])
def test_whole_numbers_may_have_a_decimal_point(server: HttpServer, path: str, prompt: Any) -> None:
    name = "prompt" if isinstance(prompt, str) else "messages"
    asked(server, path, **{name: prompt}, max_tokens=3.0, top_k=7.0, seed=5.0, n=1.0, temperature=1)
    sampling = server.requests[-1].sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (3, 7, 5)
    assert all(type(one) is int for one in (sampling.max_tokens, sampling.top_k, sampling.seed))


def test_a_prompt_is_truncated_from_its_beginning(server: HttpServer) -> None:
    ids = list(range(100, 700))
    for keep, length in ((4, 4), (1000, None), (-1, 510)):
        body = {"prompt": ids, "max_tokens": 2, "truncate_prompt_tokens": keep}
        response = server.post("/v1/completions", body)
        if length is None:
            assert response.json()["error"]["code"] == "context_length_exceeded"
        else:
            assert tokens_of(server.requests[-1]) == ids[-length:]
    whole = asked(server, "/tokenize", messages=HI)["tokens"]
    asked(server, "/v1/chat/completions", messages=HI, truncate_prompt_tokens=5)
    assert tokens_of(server.requests[-1]) == whole[-5:]
    response = server.post("/v1/responses", {"input": "Hi", "truncate_prompt_tokens": 3})
    assert response.status_code == 200, response.text
    assert tokens_of(server.requests[-1]) == whole[-3:]
    refused = server.post("/v1/completions", {"prompt": "Hi", "truncate_prompt_tokens": 0})
    assert "truncate_prompt_tokens" in refused.json()["error"]["message"]


def test_the_echo_of_a_truncated_prompt_is_what_was_read(server: HttpServer) -> None:
    ids = server.tokenizer.encode("one two three four five")[-2:]
    body = {"prompt": "one two three four five", "echo": True, "logprobs": 0, "truncate_prompt_tokens": 2}
    (choice,) = asked(server, "/v1/completions", **body)["choices"]
    text = server.tokenizer.decode(ids, skip_special=False)
    assert choice["text"].startswith(text)
    assert choice["logprobs"]["text_offset"][:3] == [0, len(server.tokenizer.decode(ids[:1])), len(text)]


def test_bad_words_are_excluded_with_and_without_a_blank(server: HttpServer) -> None:
    asked(server, "/v1/completions", prompt="Hi", bad_words=["the"], logit_bias={"5": 1})
    bias = server.requests[-1].sampling.logit_bias
    for written in ("the", " the"):
        (token,) = server.tokenizer.encode(written)
        assert bias[token] <= -1e4
    assert bias[5] == 1
    asked(server, "/v1/completions", prompt="Hi", bad_words=["extraordinarily long words"])
    sequences = {tuple(server.tokenizer.encode(f"{blank}extraordinarily long words")) for blank in ("", " ")}
    assert set(server.requests[-1].sampling.bad_sequences) == sequences
    refused = server.post(
        "/v1/completions", {"prompt": "Hi", "bad_words": ["extraordinarily long words " * 9]}
    )
    assert refused.status_code == 400
    assert "bad_words" in refused.json()["error"]["message"]


def test_allowed_tokens_are_a_grammar(server: HttpServer) -> None:
    asked(server, "/v1/completions", prompt="Hi", allowed_token_ids=[9, 7, 8, 20])
    assert "<[7-9,20]>" in server.requests[-1].sampling.grammar
    for body in ({"allowed_token_ids": [5], "guided_regex": "a"}, {"allowed_token_ids": [1 << 20]}):
        refused = server.post("/v1/completions", {"prompt": "Hi"} | body)
        assert refused.status_code == 400
        assert "allowed_token_ids" in refused.json()["error"]["message"]


def test_prompt_logprobs(server: HttpServer) -> None:
    ids = [5, 6, 7]
    (choice,) = asked(server, "/v1/completions", prompt=ids, prompt_logprobs=1)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [list(one) for one in others] == [["6"], ["7"]]
    assert others[0]["6"] == {"logprob": -0.5, "rank": 1, "decoded_token": server.tokenizer.token_text(6)}
    assert choice["logprobs"] is None
    chat = asked(server, "/v1/chat/completions", messages=HI, prompt_logprobs=2)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert {len(one) for one in chat["prompt_logprobs"][1:]} == {2}
    refused = server.post("/v1/completions", {"prompt": "Hi", "prompt_logprobs": 1, "stream": True})
    assert refused.status_code == 400


def test_an_answer_that_is_begun_goes_on(server: HttpServer) -> None:
    begun = [*HI, {"role": "assistant", "content": "Well, I"}]
    asked(server, "/v1/chat/completions", messages=begun, continue_final_message=True)
    chat = prompt_of(server)
    assert chat.endswith("Well, I")
    asked(server, "/v1/messages", model=NAME, messages=begun)
    assert prompt_of(server).endswith("Well, I")
    for wrong in (
        {"messages": HI},
        {"messages": begun, "add_generation_prompt": True},
        {"messages": [*HI, {"role": "assistant", "content": ""}]},
    ):
        refused = server.post("/v1/chat/completions", wrong | {"continue_final_message": True})
        assert refused.json()["error"]["param"] == "continue_final_message"
    asked(server, "/v1/chat/completions", messages=begun)
    assert prompt_of(server) != chat


def test_responses_take_sampling_and_template_fields(server: HttpServer) -> None:
    server.answer = say("a b")
    body = {
        "input": "Hi",
        "seed": 5,
        "stop": "x",
        "top_k": 7,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert server.post("/v1/responses", body).status_code == 200
    request = server.requests[-1]
    assert (request.sampling.seed, request.sampling.top_k, request.text.stop) == (5, 7, ("x",))
    assert prompt_of(server).endswith("<think>\n\n</think>\n\n")


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server with everything that an operator can set for its requests."""
    template = tmp_path_factory.mktemp("template") / "own.jinja"
    template.write_text(TEMPLATE)
    with http_server(
        served_model_name=f"{NAME},gpt-4,other/name",
        chat_template=str(template),
        override_generation_config='{"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 9}',
        allowed_origin=("https://chat.example.com",),
    ) as running:
        yield running


def test_a_model_has_several_names(custom: HttpServer) -> None:
    names = [card["id"] for card in custom.get("/v1/models").json()["data"]]
    assert names == [NAME, "gpt-4", "other/name"]
    for name in names:
        answer = custom.post("/v1/completions", {"model": name, "prompt": "Hi", "max_tokens": 1})
        assert answer.json()["model"] == NAME
        assert custom.get(f"/v1/models/{name}").json()["id"] == name
    assert custom.post("/v1/completions", {"model": "another", "prompt": "Hi"}).status_code == 404


def test_a_template_of_the_operators(custom: HttpServer) -> None:
    asked(custom, "/v1/chat/completions", messages=HI)
    assert prompt_of(custom) == "[user]Hi[go]"
    begun = [*HI, {"role": "assistant", "content": "Well"}]
    asked(custom, "/v1/chat/completions", messages=begun, continue_final_message=True)
    assert prompt_of(custom) == "[user]Hi[assistant]Well"


def test_the_longest_answer_where_neither_the_request_nor_its_api_sets_a_bound(custom: HttpServer) -> None:
    for path, body, tokens in (
        ("/v1/chat/completions", {"messages": HI}, 9),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 20}, 20),
        ("/v1/responses", {"input": "Hi"}, 9),
        ("/v1/completions", {"prompt": "Hi"}, 16),
        ("/v1/messages", {"model": NAME, "messages": HI, "max_tokens": 20}, 20),
    ):
        assert custom.post(path, body).status_code == 200
        assert custom.requests[-1].sampling.max_tokens == tokens


def test_sampling_defaults_are_for_what_a_request_leaves_out(custom: HttpServer) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/messages", {"model": NAME, "messages": HI}),
    ):
        asked(custom, path, **body)
        sampling = custom.requests[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.5, 20, 1.1)
        asked(custom, path, **body, temperature=1, top_k=0)
        sampling = custom.requests[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (1, 0, 1.1)
    asked(custom, "/generate", inputs="Hi")
    assert custom.requests[-1].sampling.temperature == 0, "LightLLM's default is greedy"


def test_pages_of_an_allowed_origin_may_ask(custom: HttpServer, server: HttpServer) -> None:
    import httpx

    asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    for origin, allowed in (("https://chat.example.com", True), ("https://evil.example.com", False)):
        preflight = httpx.options(custom.url + "/v1/completions", headers=asks | {"origin": origin})
        assert (preflight.headers.get("access-control-allow-origin") == origin) == allowed
        models = custom.get("/v1/models", headers={"origin": origin})
        assert (models.headers.get("access-control-allow-origin") == origin) == allowed
    closed = httpx.options(
        server.url + "/v1/completions", headers=asks | {"origin": "https://chat.example.com"}
    )
    assert "access-control-allow-origin" not in closed.headers


def test_defaults_that_the_model_recommends(tmp_path: Path) -> None:
    config = ServerConfig(model=str(tmp_path), generation_config="auto")
    assert sampling_defaults(config, {}) == SamplingDefaults()
    in_gguf = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    assert sampling_defaults(config, in_gguf).settings == {"temperature": 0.6, "top_k": 20}
    recommended = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "eos_token_id": 5, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    assert sampling_defaults(config, {}).settings == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7}')
    assert sampling_defaults(config, {}).settings == {"temperature": 0.0}
    assert sampling_defaults(ServerConfig(model=str(tmp_path)), {}) == SamplingDefaults()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"temprature": 1}', '{"top_p": 2}', '{"top_k": 1.5}', '{"top_p": true}']
)
def test_defaults_by_flag_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--override-generation-config"):
        sampling_defaults(ServerConfig(override_generation_config=text), {})


def test_a_template_that_is_none_is_told(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for")
    server = HttpServer(chat_template=str(template))
    try:
        failed = server.start_message()
        assert isinstance(failed, ProcessFailed)
        assert failed.message.startswith("--chat-template")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        *(("temperature", -1, 0.0), ("temperature", 3, 3.0), ("top_p", 1.5, 1.0), ("top_p", -1, 0.0)),
        *(("min_p", -0.1, 0.0), ("min_p", 9, 1.0), ("typical_p", 2, 1.0), ("presence_penalty", 3, 3.0)),
        *(("frequency_penalty", -3, -3.0), ("top_k", -1, 0)),
    ],
)
def test_numbers_beyond_openais_ranges_where_the_api_takes_any(
    server: HttpServer, name: str, value: float, meant: float
) -> None:
    for path, body in (
        ("/completion", {"prompt": "Hi", "n_predict": 2, name: value}),
        (
            "/api/chat",
            {"model": NAME, "messages": HI, "stream": False, "options": {"num_predict": 2, name: value}},
        ),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        assert getattr(server.requests[-1].sampling, name) == meant
    assert server.post("/v1/completions", {"prompt": "Hi", name: -100}).status_code == 400
