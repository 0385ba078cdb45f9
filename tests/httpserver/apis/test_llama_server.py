"""llama-server's /completion and /props, in the form that llama.cpp's clients read."""

from __future__ import annotations

import json
from typing import Any

import httpx

from moeserve.messages.schema import GenerateRequest, TextItem, TextOut, Usage
from tests.support.chats.scripted_answers import prompt_of
from tests.support.servers.engine_messages import CONTEXT
from tests.support.servers.fresh_server import as_new
from tests.support.servers.http_harness import NAME, TLS, HttpServer, say, tokens_of

BODY: Any = {"prompt": "Who is it?", "n_predict": 8}


_as_new = as_new(say("A", " fox", "."))


def test_an_answer_whole(server: HttpServer) -> None:
    found = server.post("/completion", BODY).json()
    assert (found["content"], found["stop"], found["stop_type"]) == ("A fox.", True, "eos")
    assert (found["stopping_word"], found["tokens"], found["model"]) == ("", [], NAME)
    assert prompt_of(server) == "Who is it?"
    num_prompt = len(tokens_of(server.requests[-1]))
    assert (found["tokens_evaluated"], found["tokens_predicted"]) == (num_prompt, 3)
    timings = found["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (num_prompt, 3)
    assert (timings["prompt_ms"], timings["predicted_ms"]) == (2.0, 4.0)
    assert found["generation_settings"]["seed"] == server.requests[-1].sampling.seed


def test_drafts_are_in_the_timings(server: HttpServer) -> None:
    """Where there were some, as llama-server has them."""
    assert not {"draft_n", "draft_n_accepted"} & server.post("/completion", BODY).json()["timings"].keys()

    def drafted(server: HttpServer, request: GenerateRequest) -> None:
        usage = Usage(4, 1, 0, 1.0, 2.0, 4.0, draft_tokens=7, accepted_draft_tokens=2)
        server.send(TextOut([TextItem(request.id, "A", [5], finish_reason="stop", usage=usage)]))

    server.answer = drafted
    timings = server.post("/completion", BODY).json()["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (7, 2)


def test_an_answer_in_chunks(server: HttpServer) -> None:
    response = server.post("/completion", BODY | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    chunks = [json.loads(event) for event in events]  # and so no [DONE]
    assert [chunk["content"] for chunk in chunks] == ["A", " fox", ".", ""]
    assert [chunk["stop"] for chunk in chunks] == [False, False, False, True]
    assert all(len(chunk["tokens"]) == 1 for chunk in chunks[:3])
    assert chunks[-1]["tokens_predicted"] == 3
    assert chunks[-1]["timings"]["predicted_n"] == 3


def test_parameters_reach_the_engine(server: HttpServer) -> None:
    body = BODY | {"temperature": 0.5, "top_k": 5, "seed": 3, "stop": ["x"], "repeat_penalty": 1.2}
    idle = {"cache_prompt": True, "id_slot": -1, "n_keep": 7, "typical_p": 1.0, "repeat_last_n": 64}
    assert server.post("/completion", body | idle | {"grammar": ""}).status_code == 200
    request = server.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.max_tokens) == (0.5, 5, 3, 8)
    assert (sampling.repetition_penalty, request.text.stop, sampling.grammar) == (1.2, ("x",), "")
    ids = tokens_of(request)
    whole = server.post("/completion", {"prompt": ids, "return_tokens": True}).json()
    assert (tokens_of(server.requests[-1]), len(whole["tokens"])) == (ids, 3)
    assert server.requests[-1].sampling.max_tokens == CONTEXT - len(ids)
    for field in ({"grammar": 'root ::= "yes"'}, {"json_schema": {"type": "boolean"}}):
        assert server.post("/completion", BODY | field).status_code == 200
        assert server.requests[-1].sampling.grammar


def test_probabilities_and_timings_of_each_token(server: HttpServer) -> None:
    whole = server.post("/completion", BODY | {"n_probs": 2}).json()
    assert server.requests[-1].sampling.logprobs == 2
    first = whole["completion_probabilities"][0]
    assert len(whole["completion_probabilities"]) == 3
    assert first["bytes"] == list(first["token"].encode())
    assert first["logprob"] <= 0
    assert [sorted(one) for one in first["top_logprobs"]] == [["bytes", "id", "logprob", "token"]] * 2
    streamed = server.post("/completion", BODY | {"n_probs": 1, "timings_per_token": True, "stream": True})
    chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line]
    assert [len(chunk["completion_probabilities"]) for chunk in chunks] == [1, 1, 1, 0]
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == [1, 2, 3, 3]
    assert "completion_probabilities" not in server.post("/completion", BODY).json()


def test_why_an_answer_ended(server: HttpServer) -> None:
    server.answer = say("A", reason="length")
    assert server.post("/completion", BODY).json()["stop_type"] == "limit"
    server.answer = say("A", stop_reason="fox")
    found = server.post("/completion", BODY | {"stop": "fox"}).json()
    assert (found["stop_type"], found["stopping_word"]) == ("word", "fox")


def test_what_is_refused(server: HttpServer) -> None:
    for body, part in (
        ({}, "prompt"),
        (BODY | {"prompt": ["a", "b"]}, "prompt"),
        (BODY | {"n_predict": -3}, "n_predict"),
        (BODY | {"n_probs": 21}, "n_probs"),
        (BODY | {"post_sampling_probs": True}, "post_sampling_probs"),
        (BODY | {"grammar": 'root ::= "a"', "json_schema": {}}, "only one of"),
        (BODY | {"model": "other"}, "other"),
    ):
        refused = server.post("/completion", body)
        assert refused.status_code in (400, 404)
        assert part in refused.json()["error"]["message"]
    assert server.requests == []


def test_props(server: HttpServer) -> None:
    found = httpx.get(server.url + "/props", verify=TLS).json()
    settings = found["default_generation_settings"]
    assert (settings["n_ctx"], settings["params"]["temperature"]) == (CONTEXT, 1.0)
    assert found["model_alias"] == NAME
    assert found["total_slots"] > 0
    assert "im_start" in found["chat_template"]
    assert found["eos_token"]
