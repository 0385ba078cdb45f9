"""Beam search through the whole server: answers, scores, usage, refusals, and clients that go away."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.e2e.completions import TEXT, at_once, completion, is_empty
from tests.support.servers.server import Server
from tests.support.servers.waiting import within

BEAMS: dict[str, Any] = {"use_beam_search": True, "max_tokens": 8, "ignore_eos": True, "prompt": TEXT}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8}


def search(server: Server, **body: Any) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = server.post("/v1/completions", BEAMS | body)["choices"]
    return choices


def test_answers_come_best_first_with_their_logprobs(server: Server) -> None:
    answer = server.post("/v1/completions", BEAMS | {"n": 4, "logprobs": 2, "length_penalty": 0.5})
    scores = [choice["beam_score"] for choice in answer["choices"]]
    assert scores == sorted(scores, reverse=True)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length"
        logprobs = choice["logprobs"]["token_logprobs"]
        assert sum(logprobs) / 8**0.5 == pytest.approx(choice["beam_score"], abs=1e-4)
    assert len({choice["text"] for choice in answer["choices"]}) == 4
    usage = answer["usage"]
    assert usage["completion_tokens"] == 4 * 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 32


def test_an_answer_is_at_least_as_likely_as_the_greedy_one(server: Server) -> None:
    """And one beam is the greedy answer."""
    greedy = completion(server, prompt=TEXT, max_tokens=8, logprobs=0)
    (one,) = search(server, beam_width=1)
    assert one["text"] == greedy["text"]
    (best,) = search(server, beam_width=8)
    assert best["beam_score"] >= sum(greedy["logprobs"]["token_logprobs"]) / 8 - 1e-4


@pytest.mark.cpu_engine("a search finds the same whatever shares its steps")
def test_a_search_is_the_same_beside_others(server: Server) -> None:
    searches: list[dict[str, Any]] = [
        {"beam_width": 4, "n": 2},
        {"n": 3, "num_beam_groups": 3, "diversity_penalty": 0.5},
    ] * 2
    alone = [search(server, **body) for body in searches[:2]]
    together = at_once(lambda body: search(server, **body), searches)
    texts = [[choice["text"] for choice in choices] for choices in (*alone, *alone)]
    assert [[choice["text"] for choice in choices] for choices in together] == texts


def test_an_end_token_ends_an_answer(server: Server) -> None:
    """It is counted and is no part of the text."""
    (choice,) = search(server, return_token_ids=True)
    third = choice["token_ids"][2]
    body = {"ignore_eos": False, "stop_token_ids": [third], "n": 4, "length_penalty": -2.0}
    answer = server.post("/v1/completions", BEAMS | {"return_token_ids": True} | body)
    ended = [choice for choice in answer["choices"] if choice["stop_reason"] == third]
    assert ended
    assert all(choice["finish_reason"] == "stop" and third not in choice["token_ids"] for choice in ended)
    tokens = sum(len(c["token_ids"]) + (c["finish_reason"] == "stop") for c in answer["choices"])
    assert answer["usage"]["completion_tokens"] == tokens


def test_conversations(server: Server) -> None:
    body = CHAT | {"use_beam_search": True, "n": 2, "beam_width": 3, "logprobs": True, "early_stopping": True}
    answer = server.post("/v1/chat/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["message"]["role"] == "assistant" for choice in answer["choices"])
    assert answer["choices"][0]["beam_score"] >= answer["choices"][1]["beam_score"]
    assert all(choice["logprobs"]["content"] for choice in answer["choices"])


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ({"stream": True}, "beams are known at the end only: leave out stream"),
        ({"temperature": 0.7}, "beam search does not sample: leave it out"),
        ({"repetition_penalty": 1.1}, "scored by the model's own log-probabilities"),
        ({"stop": ["."]}, "use stop_token_ids"),
        (
            {"guided_regex": "[a-z]+", "ignore_eos": False},
            "guided_regex: cannot be combined with use_beam_search",
        ),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": False},
            "response_format: cannot be combined",
        ),
        ({"n": 4, "beam_width": 2}, "beam_width: must be at least n, 4, got 2"),
        ({"beam_width": 4, "num_beam_groups": 3}, "num_beam_groups: must divide the 4 beams"),
        ({"diversity_penalty": 1.0}, "diversity_penalty: needs num_beam_groups"),
        ({"beam_width": 18, "stop_token_ids": [1, 2, 3]}, "18 beams and 3 end tokens are more than 20"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs: cannot be combined"),
        ({"echo": True, "max_tokens": 0}, "max_tokens: must be at least 1 with use_beam_search"),
        (
            {"use_beam_search": False, "beam_width": 4},
            "beam_width: is only allowed with use_beam_search true",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(server: Server, body: dict[str, Any], cause: str) -> None:
    response = httpx.post(server.base_url + "/v1/completions", json=BEAMS | body, timeout=30)
    assert response.status_code == 400
    assert cause in response.json()["error"]["message"]


def test_a_forced_tool_is_refused(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    body = CHAT | {"use_beam_search": True, "tools": [tool], "tool_choice": "required"}
    response = httpx.post(server.base_url + "/v1/chat/completions", json=body, timeout=30)
    assert response.status_code == 400
    assert "cannot be combined with use_beam_search" in response.json()["error"]["message"]


def test_beams_of_clients_that_go_away_are_freed(server: Server) -> None:
    """Thirty of them, each in its prompt or in its search."""
    body = json.dumps(BEAMS | {"n": 4, "beam_width": 8, "max_tokens": 200}).encode()
    host, port = server.base_url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    before = server.metrics()
    for number in range(30):
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if number % 3 == 0:
                within(0.1, lambda: server.metrics()["moeserve:num_requests_running"] > 0)
    assert within(30, lambda: is_empty(server))
    search(server)
    after = server.metrics()
    assert after["moeserve:num_aborts_total"] > before["moeserve:num_aborts_total"]
    # The router reports its totals a little later than it answers.
    searches = "moeserve:beam_searches_total"
    assert within(30, lambda: server.metrics()[searches] > before[searches])
    assert after["moeserve:kv_cache_slots_used"] == 0
