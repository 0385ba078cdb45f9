"""What is not OpenAI's completions: LightLLM's routes, the tokenizer's, health, metrics, the API key."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from tests.e2e.completions import TEXT, completion, streamed
from tests.support.servers.server import Server, running_server

GREEDY = {"do_sample": False, "max_new_tokens": 16, "ignore_eos": True}


def test_tokenize_and_back(server: Server) -> None:
    text = "Déjà vu: 你好, \U0001f600! <|im_start|> 12345"
    answer = server.post("/tokenize", {"prompt": text})
    assert answer["count"] == len(answer["tokens"]) > 5
    assert answer["max_model_len"] == 2048
    assert server.post("/detokenize", {"tokens": answer["tokens"]})["prompt"] == text


def test_lightllm_generate(server: Server) -> None:
    answer = server.post("/generate", {"inputs": TEXT, "parameters": GREEDY})
    assert answer["generated_text"] == [completion(server, prompt=TEXT)["text"]]
    assert answer["count_output_tokens"] == 16
    assert answer["finish_reason"] == "length"


def test_lightllm_stream(server: Server) -> None:
    body = {"inputs": TEXT, "parameters": GREEDY}
    with httpx.stream("POST", server.base_url + "/generate_stream", json=body, timeout=60) as response:
        lines = [line.removeprefix("data:") for line in response.iter_lines() if line]
    events = [json.loads(line) for line in lines]
    assert "".join(event["token"]["text"] for event in events) == completion(server, prompt=TEXT)["text"]
    assert [event["finished"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["token"]["count_output_tokens"] == 16


def test_metrics_count_what_was_served(server: Server) -> None:
    before = server.metrics()
    prompt = server.post("/tokenize", {"prompt": TEXT})["tokens"]
    completion(server, prompt=prompt, max_tokens=20)
    *_, last = streamed(server, prompt=prompt, max_tokens=5)
    assert last["timings"]["completion_tokens"] == 5
    after = server.metrics()

    def grown(name: str) -> float:
        return after["moeserve:" + name] - before["moeserve:" + name]

    assert grown("prompt_tokens_total") == 2 * len(prompt)
    assert grown("generation_tokens_total") == 25
    assert grown("request_success_total") == 2
    assert grown("time_to_first_token_seconds_count") == 2
    assert grown("inter_token_latency_seconds_count") == 23
    assert grown("e2e_request_latency_seconds_count") == 2


def test_api_key_guards_all_but_probes(tiny_model: Path) -> None:
    with running_server(tiny_model, "--api-key", "s3cret", "--served-model-name", "mine") as server:
        url = server.base_url
        body = {"prompt": TEXT, "max_tokens": 1}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            response = httpx.post(url + "/v1/completions", json=body, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["message"]
        right = {"authorization": "Bearer s3cret"}
        assert httpx.post(url + "/v1/completions", json=body, headers=right).json()["model"] == "mine"
        assert httpx.get(url + "/v1/models").status_code == 401
        assert httpx.get(url + "/health").status_code == 200
        assert httpx.get(url + "/metrics").status_code == 200
        shown = " ".join(" ".join(process.cmdline()) for process in server.processes()[1:])
        assert "s3cret" not in shown, "a child's command line shows the key"
