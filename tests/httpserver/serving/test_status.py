"""What gateways, load balancers and lm-eval ask of a server: readiness, load, version, tokenizer; and HEAD."""

from __future__ import annotations

from functools import partial

import httpx
import msgspec

from moeserve import __version__
from moeserve.messages.router_metrics import LoadReport
from tests.support.servers.engine_messages import ready_message
from tests.support.servers.http_harness import NAME, TLS, HttpServer, http_server, say
from tests.support.servers.waiting import within


def test_load_under_the_names_that_gateways_read(own_server: HttpServer) -> None:
    idle = LoadReport(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    busy = msgspec.structs.replace(idle, num_running=3, num_waiting=2, kv_slots_used=50, kv_slots_total=200)
    own_server.send(msgspec.structs.replace(busy, prompt_tokens=40, cached_tokens=10))
    labels = f'{{model_name="{NAME}"}}'
    assert within(30, lambda: own_server.metrics()[f"vllm:num_requests_running{labels}"] == 3)
    metrics = own_server.metrics()
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
    ):
        assert metrics[f"vllm:{name}{labels}"] == metrics[f"moeserve:{name}{labels}"]
    assert any("vllm:cache_config_info" in name and 'cache_dtype="auto"' in name for name in metrics)
    assert any("vllm:cache_config_info" in name and 'num_gpu_blocks="3"' in name for name in metrics)
    loads = own_server.get("/v1/loads").json()
    (load,) = loads["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["token_usage"]) == (3, 2, 0.25)
    assert loads["aggregate"]["total_reqs"] == 5
    assert load["cache_hit_rate"] == 0.25
    assert loads["engine"] == "a test"


def test_where_the_seconds_of_a_workers_start_went(server: HttpServer) -> None:
    """Only the last start counts."""
    prefix = f'moeserve:worker_start_seconds{{model_name="{NAME}",phase='

    def told() -> dict[str, float]:
        return {name: value for name, value in server.metrics().items() if name.startswith(prefix)}

    for seconds in ({"imports": 2.5, "weights": 1.25, "graphs": 0.5}, {"imports": 0.25, "weights": 1.0}):
        again = ready_message(server.tokenizer.vocabulary.size)
        ready = msgspec.structs.replace(again.ready, start_seconds=seconds)
        server.send(msgspec.structs.replace(again, ready=ready))
        expected = {f'{prefix}"{phase}"}}': value for phase, value in seconds.items()}
        assert within(30, partial(lambda expected: told() == expected, expected))


def test_version_and_tokenizer(server: HttpServer) -> None:
    assert server.get("/version").json() == {"version": __version__}
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in info["chat_template"]


def test_head_is_answered_wherever_get_is(server: HttpServer) -> None:
    labels = f'{{handler="/version",method="HEAD",model_name="{NAME}",status="200"}}'
    before = server.metrics().get("moeserve:http_requests_total" + labels, 0)
    for path in ("/health", "/v1/models", "/version", "/metrics", "/"):
        head = httpx.head(server.url + path, verify=TLS)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == httpx.get(server.url + path, verify=TLS).headers[
            "content-length"
        ] or (path == "/metrics")
    assert httpx.head(server.url + "/v1/completions", verify=TLS).status_code == 405
    assert server.metrics()["moeserve:http_requests_total" + labels] == before + 1


def test_readiness_goes_before_the_drain() -> None:
    with http_server(drain_delay=3.0) as server:
        server.answer = say("Fine.")
        assert server.get("/health/ready").status_code == server.get("/health/live").status_code == 200
        server.terminate()
        assert within(30, lambda: server.get("/health/ready").status_code == 503)
        assert server.get("/health/live").json() == {"status": "draining"}
        assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}).status_code == 200
        assert server.process.wait(30) == 0
