"""LightLLM's /generate and /generate_stream, /tokenize and /detokenize, /metrics."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeserve.config.speculative import MOST_DRAFTS
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.messages.router_metrics import ACCEPTED_BOUNDS, LoadReport
from moeserve.messages.schema import GenerateRequest, TextItem, TextOut, Usage
from tests.support.servers.engine_messages import CONTEXT
from tests.support.servers.fresh_server import as_new
from tests.support.servers.http_harness import NAME, HttpServer, echo, tokens_of
from tests.support.servers.waiting import within

TEXT = "The quick brown fox"


_as_new = as_new(echo)


def stream(server: HttpServer, **parameters: Any) -> list[dict[str, Any]]:
    response = server.post("/generate_stream", {"inputs": TEXT, "parameters": parameters})
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data:")) for line in response.text.split("\n\n") if line]


def test_generate(server: HttpServer) -> None:
    ids = server.tokenizer.encode(TEXT)
    body = {"inputs": TEXT, "parameters": {"max_new_tokens": 3, "return_details": True}}
    answer = server.post("/generate", body).json()
    assert answer["generated_text"] == [server.tokenizer.decode(ids[:3])]
    assert answer["count_output_tokens"] == 3
    assert answer["finish_reason"] == "length"
    assert answer["prompt_tokens"] == len(ids)
    assert [token["id"] for token in answer["tokens"]] == ids[:3]
    assert all(token["logprob"] == -0.5 for token in answer["tokens"])
    assert answer["timings"]["decode_ms"] == 4.0


def test_generate_is_greedy_unless_do_sample(server: HttpServer) -> None:
    server.post("/generate", {"inputs": TEXT, "parameters": {"temperature": 0.7, "top_k": -1}})
    server.post("/generate", {"inputs": TEXT, "parameters": {"temperature": 0.7, "do_sample": True}})
    greedy, sampled = server.requests
    assert (greedy.sampling.temperature, greedy.sampling.max_tokens) == (0.0, 16)
    assert sampled.sampling.temperature == 0.7
    assert sampled.sampling.top_k == 0


def test_generate_stop_sequences_are_strings_or_single_tokens(server: HttpServer) -> None:
    parameters = {"stop_sequences": ["one", [7]], "ignore_eos": True, "min_new_tokens": 4}
    server.post("/generate", {"inputs": TEXT, "parameters": parameters})
    (request,) = server.requests
    assert request.text.stop == ("one",)
    assert request.sampling.stop_token_ids == (7,)
    assert request.sampling.min_tokens == 3  # LightLLM counts the end token


def test_generate_n_makes_lists(server: HttpServer) -> None:
    answer = server.post("/generate", {"inputs": TEXT, "parameters": {"n": 2, "max_new_tokens": 2}}).json()
    assert len(answer["generated_text"]) == 2
    assert answer["count_output_tokens"] == [2, 2]
    assert answer["finish_reason"] == ["length", "length"]


def test_generate_stream_has_an_event_per_token(server: HttpServer) -> None:
    events = stream(server, max_new_tokens=4)
    ids = server.tokenizer.encode(TEXT)
    assert [event["token"]["id"] for event in events] == [ids[i % len(ids)] for i in range(4)]
    assert [event["token"]["count_output_tokens"] for event in events] == [1, 2, 3, 4]
    assert [event["finished"] for event in events] == [False] * 3 + [True]
    assert [event["finish_reason"] for event in events] == [None] * 3 + ["length"]
    assert events[0].keys() == {"token", "generated_text", "finished", "finish_reason", "details"}
    assert events[-1]["details"]["completion_tokens"] == 4


def test_generate_stream_splits_items_and_ends_with_the_stop_token(server: HttpServer) -> None:
    eos = server.tokenizer.vocabulary.eos_ids[0]

    def answer(server: HttpServer, request: GenerateRequest) -> None:
        usage = Usage(4, 3, 0, 0.0, 0.0, 0.0)
        ended = TextItem(request.id, "", [], finish_reason="stop", stop_reason=eos, usage=usage)
        server.send(TextOut([TextItem(request.id, "ab", [5, 6]), TextItem(request.id, "c", [])]))
        server.send(TextOut([ended]))

    server.answer = answer
    tokens = [event["token"] for event in stream(server)]
    assert [(token["id"], token["text"]) for token in tokens] == [(5, ""), (6, "ab"), (None, "c"), (eos, "")]
    assert tokens[-1]["special"]


def test_tokenize_and_back(server: HttpServer) -> None:
    text = "Grüße, 世界! 👋 <|im_end|>"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == CONTEXT
    assert answer["tokens"] == server.tokenizer.encode(text)
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {
        "prompt": text,
        "content": text,
    }


def test_tokenize_messages_as_chat_does(server: HttpServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert tokens == tokens_of(server.requests[0])
    bare = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert bare["tokens"] == tokens[: bare["count"]]
    assert bare["count"] < len(tokens)


def test_metrics_of_the_router_and_of_requests(own_server: HttpServer) -> None:
    before = own_server.metrics()
    own_server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 5})
    own_server.send(LoadReport(3, 2, 128, 512, 1000, 900, 400, 1, 6, 77))
    assert within(30, lambda: own_server.metric("num_requests_running") == 3)
    gauges = {
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "kv_cache_slots_used": 128,
        "kv_cache_slots_total": 512,
        "prompt_tokens_total": 1000,
        "generation_tokens_total": 900,
        "prefix_cache_hits_total": 400,
        "num_preemptions_total": 1,
        "num_aborts_total": 6,
    }
    assert {name: own_server.metric(name) for name in gauges} == gauges

    def grown(name: str) -> float:
        key = f'moeserve:{name}{{model_name="{NAME}"}}'
        return own_server.metrics()[key] - before[key]

    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == 4
    assert grown("e2e_request_latency_seconds_count") == 1
    assert grown("request_queue_time_seconds_sum") == pytest.approx(0.001)
    assert grown("request_prefill_time_seconds_sum") == pytest.approx(0.002)
    assert grown("request_decode_time_seconds_sum") == pytest.approx(0.004)
    assert grown("request_prompt_tokens_sum") == len(own_server.tokenizer.encode(TEXT))
    assert grown("request_generation_tokens_sum") == 5
    ended = f'moeserve:request_success_total{{finished_reason="length",model_name="{NAME}"}}'
    assert own_server.metrics()[ended] == before[ended] + 1


# What dashboards, autoscalers and routers made for vLLM read of a server, in its names of 2025 and 2026.
VLLM_NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("gpu_prefix_cache_queries_total", "gpu_prefix_cache_hits_total"),
    *("prompt_tokens_total", "generation_tokens_total"),
    *("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count"),
    *("inter_token_latency_seconds_sum", "time_per_output_token_seconds_sum"),
    *("e2e_request_latency_seconds_sum", "request_queue_time_seconds_sum"),
    *("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"),
    *("request_inference_time_seconds_sum", "request_time_per_output_token_seconds_sum"),
    *("request_prompt_tokens_sum", "request_generation_tokens_sum"),
)


def test_metrics_under_vllm_s_names() -> None:
    metrics = Metrics("m")
    metrics.reported.load = LoadReport(3, 2, 128, 512, 1000, 900, 400, 1)
    metrics.tokens(1, now=10.0, arrival=9.0, last=None)
    metrics.tokens(4, now=12.0, arrival=9.0, last=10.0)
    metrics.finished("length", Usage(7, 5, 0, 1.0, 2.0, 8.0), 3.0)
    samples = dict(
        line.rsplit(" ", 1) for line in metrics.render()[0].decode().splitlines() if not line.startswith("#")
    )
    theirs = {name: float(samples[f'vllm:{name}{{model_name="m"}}']) for name in VLLM_NAMES}
    assert all(theirs.values()), "nothing is left at 0"
    assert theirs["gpu_cache_usage_perc"] == theirs["kv_cache_usage_perc"] == 0.25
    assert theirs["generation_tokens_total"] == 900
    assert theirs["time_per_output_token_seconds_sum"] == theirs["inter_token_latency_seconds_sum"] == 2.0
    assert theirs["request_time_per_output_token_seconds_sum"] == pytest.approx(0.002)
    assert theirs["request_inference_time_seconds_sum"] == pytest.approx(0.01)
    assert samples['vllm:time_to_first_token_seconds_bucket{le="1.0",model_name="m"}'] == "1.0"
    assert samples['vllm:request_success_total{finished_reason="length",model_name="m"}'] == "1.0"


def test_accepted_drafts_by_position() -> None:
    """ggml-org/llama.cpp#24536: of rows of one to three drafts, some were kept."""
    assert len(ACCEPTED_BOUNDS) == MOST_DRAFTS
    metrics = Metrics("m", most_drafts=5)
    for kept in (0, 1, 3, 3):
        metrics.reported.load.accepted_lengths.add(kept)
    lines = metrics.render()[0].decode().splitlines()
    per_position = [
        line for line in lines if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert [line.partition("{")[2] for line in per_position] == [
        f'model_name="m",position="{position}"}} {count}'
        for position, count in enumerate(("3.0", "2.0", "2.0", "0.0", "0.0"))
    ]
    assert 'moeserve:spec_decode_accepted_length_sum{model_name="m"} 7.0' in lines


def test_tokens_that_come_together_share_their_gap() -> None:
    metrics = Metrics("m")
    metrics.tokens(1, now=10.0, arrival=9.0, last=None)
    metrics.tokens(4, now=12.0, arrival=9.0, last=10.0)
    text = metrics.render()[0].decode()
    assert 'moeserve:time_to_first_token_seconds_sum{model_name="m"} 1.0' in text
    assert 'moeserve:inter_token_latency_seconds_sum{model_name="m"} 2.0' in text
    assert 'moeserve:inter_token_latency_seconds_count{model_name="m"} 4.0' in text
