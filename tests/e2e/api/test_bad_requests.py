"""Every field with wrong values: a 4xx in OpenAI's shape that names the field, and nobody else notices."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.e2e.completions import TEXT, from_cache, is_empty
from tests.e2e.load.steady_streams import SteadyStreams
from tests.support.servers.server import Server
from tests.support.servers.waiting import within

JSON = {"content-type": "application/json"}
CONTEXT = 2048  # of the tiny model
VOCABULARY = 4096
HUGE = 10**30
NOT_NUMBERS: list[Any] = ["one", [], {}, [1]]
NOT_INTEGERS: list[Any] = [*NOT_NUMBERS, 1.5, HUGE, -HUGE]
NOT_BOOLEANS: list[Any] = ["yes", 2, [], {}]

SHARED_FIELDS: dict[str, list[Any]] = {
    "model": [5, [], {}, "x" * 10_000],
    "n": [*NOT_INTEGERS, 0, -1, 100_000],
    "stream": NOT_BOOLEANS,
    "stream_options": [5, "usage", {"include_usage": "yes"}, {"unheard_of": True}],
    "temperature": [*NOT_NUMBERS, -0.1, 1e9, HUGE],
    "top_p": [*NOT_NUMBERS, -0.1, 0, 1.1],
    "top_k": [*NOT_INTEGERS, -2],
    "min_p": [*NOT_NUMBERS, -0.1, 1.1],
    "presence_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "frequency_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "repetition_penalty": [*NOT_NUMBERS, 0, -1],
    "logit_bias": [
        5,
        "x",
        [1],
        {"x": 1},
        {"-1": 1},
        {"1.5": 1},
        {"5": 101},
        {"5": "much"},
        {str(VOCABULARY): 1},
    ],
    "seed": NOT_INTEGERS,
    "stop": [5, [5], {"a": 1}, ["x"] * 1000, "x" * 100_000],
    "stop_token_ids": [5, ["x"], [-1], [1.5], [HUGE], [VOCABULARY], [1] * 10_000],
    "ignore_eos": NOT_BOOLEANS,
    "min_tokens": [*NOT_INTEGERS, -1, CONTEXT + 1],
    "skip_special_tokens": NOT_BOOLEANS,
    "include_stop_str_in_output": NOT_BOOLEANS,
    "return_tokens_as_token_ids": NOT_BOOLEANS,
    "priority": NOT_INTEGERS,
    "max_tokens": [*NOT_INTEGERS, -2, CONTEXT + 1],
}
COMPLETION_FIELDS: dict[str, list[Any]] = SHARED_FIELDS | {
    "prompt": [
        *[5, 1.5, True, {}, [], [[]], ["a", 5], [5, "a"], [None], [[1], "a"], [[[1]]]],
        *[[-1], [VOCABULARY], [HUGE], [1.5], [True]],
        [5] * CONTEXT,
        "long " * CONTEXT,
        [[5]] * 100_000,
    ],
    "echo": NOT_BOOLEANS,
    "logprobs": [*NOT_INTEGERS, -1, 21],
}
CHAT_FIELDS: dict[str, list[Any]] = SHARED_FIELDS | {
    "messages": [
        *[5, "hi", {}, [], [5], ["hi"], [{}], [{"role": "user"}], [{"content": "hi"}]],
        *[
            [{"role": 5, "content": "hi"}],
            [{"role": "user", "content": 5}],
            [{"role": "user", "content": {"a": 1}}],
        ],
        [{"role": "user", "content": "long " * CONTEXT}],
    ],
    "logprobs": [*NOT_BOOLEANS, 5],
    "top_logprobs": [*NOT_INTEGERS, -1, 21],
    "chat_template_kwargs": [5, "x", [1]],
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
}


def assert_refused(response: httpx.Response, what: str, param: str | None = None) -> None:
    assert 400 <= response.status_code < 500, f"{what}: {response.status_code} {response.text[:300]}"
    error = response.json()["error"]
    assert isinstance(error["message"], str), what
    assert error["message"], what
    assert error["type"], what
    assert {"param", "code"} <= error.keys(), what
    if param is not None:
        assert param in error["message"], f"{what}: {error['message']}"
        assert len(error["message"]) < 1000, what


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", COMPLETION_FIELDS), ("/v1/chat/completions", CHAT_FIELDS)],
    ids=["completions", "chat"],
)
def test_every_field_refuses_wrong_values_beside_a_stream(
    server: Server, path: str, fields: dict[str, list[Any]]
) -> None:
    expected = from_cache(server, prompt=TEXT, max_tokens=200)["text"]
    with SteadyStreams(server) as streams, httpx.Client(base_url=server.base_url, timeout=30) as client:
        for field, values in fields.items():
            for value in values:
                response = client.post(path, json=GOOD[path] | {field: value})
                assert_refused(response, f"{field}={str(value)[:60]}", param=field)
    assert streams.error is None
    assert streams.texts
    assert set(streams.texts) == {expected}
    assert within(30, lambda: is_empty(server))


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"temperature": NaN}',
        b"[" * 200_000,
        b'{"a":' * 200_000,
    ],
    ids=["empty", "cut off", "a list", "null", "a string", "not UTF-8", "NaN", "deep list", "deep object"],
)
def test_bodies_that_are_not_a_request(server: Server, path: str, content: bytes) -> None:
    response = httpx.post(server.base_url + path, content=content, headers=JSON, timeout=30)
    assert_refused(response, repr(content[:20]))


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none(server: Server, path: str, literal: str) -> None:
    content = json.dumps(GOOD[path])[:-1] + f', "temperature": {literal}}}'
    assert_refused(httpx.post(server.base_url + path, content=content, headers=JSON, timeout=30), literal)


def test_a_page_of_another_site_must_say_that_its_body_is_json(server: Server) -> None:
    content = json.dumps(GOOD["/v1/completions"])
    url = server.base_url + "/v1/completions"
    assert httpx.post(url, content=content, timeout=30).status_code == 200
    response = httpx.post(url, content=content, headers={"origin": "https://evil.example"})
    assert response.status_code == 403
    assert "application/json" in response.json()["error"]["message"]


def test_missing_fields_are_named(server: Server) -> None:
    assert_refused(httpx.post(server.base_url + "/v1/completions", json={}), "no prompt", param="prompt")
    assert_refused(
        httpx.post(server.base_url + "/v1/chat/completions", json={}), "no messages", param="messages"
    )


def test_unknown_model_is_not_found(server: Server) -> None:
    body = GOOD["/v1/completions"] | {"model": "gpt-unheard-of"}
    response = httpx.post(server.base_url + "/v1/completions", json=body)
    assert response.status_code == 404
    assert "gpt-unheard-of" in response.json()["error"]["message"]


def test_a_request_that_can_never_fit_is_told_the_limit(server: Server) -> None:
    for length, max_tokens in ((CONTEXT + 1, 1), (2000, 100)):
        body = {"prompt": [5] * length, "max_tokens": max_tokens}
        response = httpx.post(server.base_url + "/v1/completions", json=body)
        assert_refused(response, f"{length} + {max_tokens}")
        assert str(CONTEXT) in response.json()["error"]["message"]


def test_a_body_beyond_the_limit_is_refused_unread(server: Server) -> None:
    content = b" " * (200 << 20)
    response = httpx.post(server.base_url + "/v1/completions", content=content, headers=JSON, timeout=60)
    assert response.status_code == 413


def test_unknown_paths_and_methods(server: Server) -> None:
    assert_refused(httpx.get(server.base_url + "/v1/unheard-of"), "path")
    assert_refused(httpx.get(server.base_url + "/v1/completions"), "method")
