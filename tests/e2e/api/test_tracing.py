"""Traces of a real server's requests, as a real OTLP collector gets them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.completions import TEXT
from tests.support.servers.server import Server, running_server

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from tests.e2e.api.otlp_collector import Collector, SeenSpan, collecting

CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
MESSAGES = [{"role": "user", "content": "Hi"}]
SERVER_KIND = 2


@pytest.fixture(scope="module")
def seen(tiny_model: Path) -> Iterator[Collector]:
    """All that the requests below left with the collector, once the server has ended."""
    with collecting() as collector:
        with running_server(tiny_model, "--otlp-endpoint", collector.url) as server:
            ask(server)
        yield collector


def ask(server: Server) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0.5, "seed": 7, "ignore_eos": True}
    post(server, "/v1/chat/completions", chat, traceparent=TRACEPARENT)
    completion = {"prompt": TEXT * 4, "max_tokens": 6, "n": 2, "ignore_eos": True, "stream": True}
    post(server, "/v1/completions", completion)
    post(server, "/v1/chat/completions", chat, traceparent=f"00-{'c' * 32}-{CLIENT_SPAN}-00")
    post(server, "/v1/chat/completions", {"messages": MESSAGES, "temperature": -1}, traceparent="nonsense")
    httpx.get(server.base_url + "/health")


def post(server: Server, path: str, body: object, **headers: str) -> None:
    httpx.post(server.base_url + path, json=body, headers=headers, timeout=60)


def by_route(collector: Collector, route: str, status: int) -> SeenSpan:
    (found,) = (
        span
        for span in collector.spans
        if span.attributes.get("http.route") == route
        and span.attributes["http.response.status_code"] == status
    )
    return found


def children(collector: Collector, parent: SeenSpan) -> list[SeenSpan]:
    return [span for span in collector.spans if (span.trace, span.parent) == (parent.trace, parent.id)]


def test_a_client_s_trace_goes_on_through_the_processes(seen: Collector) -> None:
    http = by_route(seen, "/v1/chat/completions", 200)
    assert (http.trace, http.parent, http.kind) == (CLIENT_TRACE, CLIENT_SPAN, SERVER_KIND)
    assert (http.name, http.process) == ("POST /v1/chat/completions", "httpserver")
    (generation,) = children(seen, http)
    assert generation.name == "chat tiny-qwen3moe-q4_k_m"
    parts = {span.name: span for span in children(seen, generation)}
    assert {name: span.process for name, span in parts.items()} == {
        "queue": "router",
        "prefill": "router",
        "decode": "router",
        "detokenize": "detokenizer",
    }
    assert seen.paths == {"/v1/traces"}
    assert seen.services == {"moeserve"}


def test_spans_lie_within_each_other_in_order(seen: Collector) -> None:
    http = by_route(seen, "/v1/chat/completions", 200)
    (generation,) = children(seen, http)
    parts = {span.name: span for span in children(seen, generation)}
    slack = 0.002  # clocks of several processes, read one after the other
    for inner, outer in [(generation, http), *((part, generation) for part in parts.values())]:
        assert outer.start - slack <= inner.start <= inner.end <= outer.end + slack, inner.name
    ordered = [parts[name] for name in ("queue", "prefill", "decode")]
    for one, next_one in itertools.pairwise(ordered):
        assert one.end <= next_one.start + slack
    assert abs(http.end - time.time()) < 120


def test_the_generation_says_what_was_asked_and_what_came(seen: Collector) -> None:
    http = by_route(seen, "/v1/chat/completions", 200)
    (generation,) = children(seen, http)
    said = generation.attributes
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "tiny-qwen3moe-q4_k_m"
    assert said["gen_ai.request.max_tokens"] == said["gen_ai.usage.output_tokens"] == 8
    assert (said["gen_ai.request.temperature"], said["gen_ai.request.seed"]) == (0.5, 7)
    assert said["gen_ai.usage.input_tokens"] > 0
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < said["gen_ai.response.time_to_first_chunk"] < http.end - http.start
    prefill = next(span for span in children(seen, generation) if span.name == "prefill")
    assert prefill.attributes["gen_ai.usage.input_tokens"] == said["gen_ai.usage.input_tokens"]


def test_names_are_those_of_the_conventions(seen: Collector) -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    used = {name for span in seen.spans for name in span.attributes if name.startswith("gen_ai.")}
    assert used
    assert used <= known


def test_each_choice_has_its_spans(seen: Collector) -> None:
    http = by_route(seen, "/v1/completions", 200)
    assert http.parent == ""
    (generation,) = children(seen, http)
    assert generation.attributes["gen_ai.operation.name"] == "text_completion"
    assert generation.attributes["gen_ai.request.choice.count"] == 2
    assert generation.attributes["gen_ai.usage.output_tokens"] == 12
    names = sorted(span.name for span in children(seen, generation))
    assert names == sorted(["queue", "prefill", "decode", "detokenize"] * 2)


def test_what_the_client_does_not_trace_is_not_traced(seen: Collector) -> None:
    assert not [span for span in seen.spans if span.trace == "c" * 32]


def test_a_refusal_and_a_probe(seen: Collector) -> None:
    refused = by_route(seen, "/v1/chat/completions", 400)
    assert refused.parent == ""  # the traceparent that was none begins a new trace
    assert children(seen, refused) == []
    assert not [span for span in seen.spans if span.attributes.get("url.path") == "/health"]


@pytest.mark.slow
@pytest.mark.waits_for_processes("the server stops within 10 s by the clock")
def test_a_collector_that_is_not_there_harms_nobody(tiny_model: Path) -> None:
    with running_server(tiny_model, "--otlp-endpoint", "http://127.0.0.1:9") as server:
        answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2})
        assert answer["usage"]["completion_tokens"] >= 1
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 10


def test_nothing_of_it_is_loaded_without_an_endpoint(server: Server) -> None:
    for process in server.processes():
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
        assert "opentelemetry" not in loaded
        assert "google/_upb" not in loaded  # protobuf
