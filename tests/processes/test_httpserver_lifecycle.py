"""Start, readiness, clients that leave, the engine's death, and the drain."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeserve.httpserver.generation.engine.silences import SILENCE_S
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.schema import (
    EngineLost,
    GenerateRequest,
    Heartbeat,
    LoadProgress,
    ProcessFailed,
    ProcessLost,
    ProcessReady,
    RequestError,
    TextItem,
    TextOut,
    Usage,
)
from tests.support.servers.engine_messages import ready_message
from tests.support.servers.fresh_server import as_new
from tests.support.servers.http_harness import NAME, HttpServer, echo, http_server, silence
from tests.support.servers.waiting import within

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


_as_new = as_new(echo)


def three_tokens(server: HttpServer, request: GenerateRequest) -> None:
    """Begins an answer and leaves it there."""
    for token_id in (5, 6, 7):
        server.send(TextOut([TextItem(request.id, "x", [token_id])]))


def end(server: HttpServer, request: GenerateRequest) -> None:
    usage = Usage(1, 4, 0, 0.0, 0.0, 0.0)
    server.send(TextOut([TextItem(request.id, "end", [8], finish_reason="length", usage=usage)]))


@contextlib.contextmanager
def client_that_leaves(server: HttpServer, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Its request is with the engine when the `with` begins; at its end the connection is closed."""
    content = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    before = len(server.requests)
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert within(30, lambda: len(server.requests) == before + body.get("n", 1))
        yield connection


def receives(connection: socket.socket, part: bytes) -> bool:
    """Reads until `part` has come; an answer's head and its first event may come one after the other."""
    received = b""
    while part not in received:
        more = connection.recv(65536)
        if not more:
            return False
        received += more
    return True


# ---------------------------------------------------------------- start


def test_answers_while_loading_then_serves() -> None:
    server = HttpServer()
    try:
        started = server.start_message()
        assert isinstance(started, ProcessReady)
        assert started.process == "httpserver"
        health = httpx.get(server.url + "/health")
        assert health.status_code == 503
        assert health.json()["status"] == "loading"
        server.send(LoadProgress("weights", 30, 120))
        expected = {"status": "loading", "stage": "weights", "fraction": 0.25}
        assert within(30, lambda: httpx.get(server.url + "/health").json() == expected)
        refused = server.post("/v1/completions", {"prompt": "Hi"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert "weights, 25%" in refused.json()["error"]["message"]
        assert httpx.get(server.url + "/v1/models").json()["data"][0]["id"] == NAME
        assert httpx.get(server.url + "/metrics").status_code == 200
        server.engine_ready()
        assert httpx.get(server.url + "/health").json() == {"status": "ok"}
        head = httpx.head(server.url + "/health")  # as monitors ask
        assert (head.status_code, head.content) == (200, b"")
        assert server.post("/v1/completions", {"prompt": "Hi"}).status_code == 200
    finally:
        server.close()


def test_a_port_in_use_is_a_clear_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = HttpServer(port=port)
        try:
            failed = server.start_message()
            assert isinstance(failed, ProcessFailed)
            assert f"port {port}" in failed.message
            assert "--port" in failed.message
            assert server.process.wait(30) == 2
        finally:
            server.close()


def test_a_model_without_tokenizer_is_a_clear_failure(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    server = HttpServer(model=str(broken))
    try:
        failed = server.start_message()
        assert isinstance(failed, ProcessFailed)
        assert "broken.gguf" in failed.message
        assert server.process.wait(30) == 2
    finally:
        server.close()


def test_the_kv_pool_may_be_the_limit() -> None:
    server = HttpServer()
    try:
        server.start_message()
        server.send(ready_message(server.tokenizer.vocabulary.size, slots=100))
        assert within(30, lambda: httpx.get(server.url + "/health").status_code == 200)
        response = server.post("/v1/completions", {"prompt": [5] * 90, "max_tokens": 11})
        assert response.status_code == 400
        assert "100" in response.json()["error"]["message"]
        assert httpx.get(server.url + "/v1/models").json()["data"][0]["max_model_len"] == 100
    finally:
        server.close()


def test_a_set_seed_makes_the_seeds_of_requests_reproducible() -> None:
    def drawn() -> list[int]:
        with http_server(seed=7) as server:
            for _ in range(2):
                server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})
            return [request.sampling.seed for request in server.requests]

    first = drawn()
    assert first == drawn()
    assert first[0] != first[1]


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("answer", [silence, three_tokens], ids=["in the queue", "mid decode"])
@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "Hi", "n": 3}), ("/v1/chat/completions", CHAT)],
    ids=["completions", "chat"],
)
def test_a_client_that_leaves_is_aborted_at_once(
    server: HttpServer, path: str, body: dict[str, Any], stream: bool, answer: Any
) -> None:
    server.answer = answer
    aborts = server.metric("request_success_total", 'finished_reason="abort",')
    with client_that_leaves(server, path, body | {"stream": stream}) as connection:
        if stream and answer is three_tokens:
            assert receives(connection, b"data: ")
        assert server.aborted == []
    ids = [request.id for request in server.requests]
    assert within(30, lambda: sorted(server.aborted) == ids)
    now = server.metric("request_success_total", 'finished_reason="abort",')
    assert now == aborts + len(ids)


def test_leaving_generate_stream(server: HttpServer) -> None:
    server.answer = three_tokens
    with client_that_leaves(server, "/generate_stream", {"inputs": "Hi"}):
        pass
    assert within(30, lambda: server.aborted == [server.requests[0].id])


def test_a_finished_request_is_not_aborted(server: HttpServer) -> None:
    for stream in (True, False):
        assert server.post("/v1/completions", {"prompt": "Hi", "stream": stream}).status_code == 200
    server.post("/v1/completions", {"prompt": "Hi"})
    assert server.aborted == []


def test_late_messages_of_a_request_that_was_aborted(server: HttpServer) -> None:
    server.answer = three_tokens
    with client_that_leaves(server, "/v1/completions", {"prompt": "Hi", "stream": True}):
        pass
    assert within(30, lambda: len(server.aborted) == 1)
    end(server, server.requests[0])
    server.send(RequestError(server.requests[0].id, 500, "too late"))
    server.answer = echo
    assert server.post("/v1/completions", {"prompt": "Hi"}).status_code == 200


def test_a_client_that_does_not_read_holds_up_nobody(server: HttpServer) -> None:
    def flood(server: HttpServer, request: GenerateRequest) -> None:
        for _ in range(200):
            server.send(TextOut([TextItem(request.id, "x" * 100_000, [5])]))

    server.answer = flood
    with client_that_leaves(server, "/v1/completions", {"prompt": "Hi", "stream": True}):
        server.answer = echo
        for _ in range(5):
            assert server.post("/v1/completions", {"prompt": "Hi"}).status_code == 200
        assert server.aborted == [], "it is still waited for"
    assert within(30, lambda: len(server.aborted) == 1)


# ---------------------------------------------------------------- failures


def test_a_failure_in_a_stream_is_an_error_event(server: HttpServer) -> None:
    def fail(server: HttpServer, request: GenerateRequest) -> None:
        three_tokens(server, request)
        server.send(RequestError(request.id, 500, "the logits were not finite"))

    server.answer = fail
    for path, body in (("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", CHAT)):
        response = server.post(path, body | {"stream": True})
        assert response.status_code == 200
        *_, failure, done = [line for line in response.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        assert json.loads(failure.removeprefix("data: "))["error"]["message"] == "the logits were not finite"
        assert server.post(path, body).status_code == 500


def test_one_failed_choice_fails_the_request_and_aborts_the_others(server: HttpServer) -> None:
    def fail_the_second(server: HttpServer, request: GenerateRequest) -> None:
        if len(server.requests) == 2:
            server.send(RequestError(request.id, 500, "broken"))

    server.answer = fail_the_second
    assert server.post("/v1/completions", {"prompt": "Hi", "n": 3}).status_code == 500
    assert within(30, lambda: len(server.requests) == 3)  # the answer may come before the third is read here
    first, _, third = server.requests
    assert within(30, lambda: sorted(server.aborted) == [first.id, third.id])


def test_a_request_has_as_long_as_the_server_gives_it() -> None:
    def begin(server: HttpServer, request: GenerateRequest) -> None:
        server.send(TextOut([TextItem(request.id, "Hi", [5])]))

    with http_server(request_timeout=2.0) as server:
        body = {"prompt": "Hi", "n": 2, "max_tokens": 5}
        server.answer = silence
        answer = server.post("/v1/completions", body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
        assert within(30, lambda: sorted(server.aborted) == [request.id for request in server.requests])
        server.answer = begin
        events = server.post("/v1/completions", body | {"stream": True}).text
        assert '"text":"Hi"' in events
        assert "not whole after 2 s" in events
        assert server.get("/health").status_code == 200


def test_a_lost_engine_is_told_by_health_until_there_is_another_and_requests_wait() -> None:
    with http_server() as server, ThreadPoolExecutor() as pool:
        server.answer = silence
        answers = [pool.submit(server.post, "/v1/completions", {"prompt": "Hi", "max_tokens": 1})]
        assert within(30, lambda: len(server.requests) == 1)
        server.send(EngineLost("worker killed by signal 9"))
        assert within(30, lambda: httpx.get(server.url + "/health").status_code == 503)
        server.send(LoadProgress("loading weights", 1, 4))
        expected = {
            "status": "restarting",
            "cause": "worker killed by signal 9",
            "stage": "loading weights",
            "fraction": 0.25,
        }
        assert within(30, lambda: httpx.get(server.url + "/health").json() == expected)
        answers.append(pool.submit(server.post, "/v1/completions", {"prompt": "Hi", "max_tokens": 1}))
        assert within(30, lambda: len(server.requests) == 2)
        server.engine_ready()
        for request in server.requests:
            echo(server, request)
        assert [answer.result().status_code for answer in answers] == [200, 200]


def test_a_router_that_says_nothing_is_noticed() -> None:
    with http_server() as server:
        server.send(LoadReport(0, 0, 0, 512, 0, 0, 0, 0, 0, 0))
        assert within(30, lambda: httpx.get(server.url + "/health").status_code == 503)
        assert httpx.get(server.url + "/health").json() == {
            "status": "unresponsive",
            "cause": "the router says nothing",
        }
        refused = server.post("/v1/completions", {"prompt": "Hi"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unresponsive"
        server.send(LoadReport(0, 0, 0, 512, 0, 0, 0, 0, 0, 0))
        assert within(30, lambda: httpx.get(server.url + "/health").status_code == 200)


def test_a_detokenizer_that_says_nothing_is_noticed() -> None:
    """No answer comes through it, although the router is well."""
    load = LoadReport(0, 0, 0, 512, 0, 0, 0, 0, 0, 0)
    with http_server() as server:
        server.send(Heartbeat("detokenizer"))

        def is_silent() -> bool:
            server.send(load)
            return httpx.get(server.url + "/health").status_code == 503

        assert within(30, is_silent)
        said = {"status": "unresponsive", "cause": "the detokenizer says nothing"}
        assert httpx.get(server.url + "/health").json() == said
        server.send(ProcessLost("detokenizer", "signal 9", by_itself=False))
        lost = "the detokenizer was lost: signal 9"
        assert within(30, lambda: httpx.get(server.url + "/health").json().get("cause") == lost)
        server.send(Heartbeat("detokenizer"))
        assert within(30, lambda: not is_silent())


def test_a_late_report_of_a_lost_router_does_not_hide_the_new_one(server: HttpServer) -> None:
    """The new router's EngineReady has been handled by then, so it is asked once more: over a new connection."""
    assert within(30, lambda: server.engine_ready_asked > 0)  # at the start
    asked = server.engine_ready_asked
    server.send(ProcessLost("router", "signal 9", by_itself=False))
    assert within(30, lambda: server.get("/health").json()["status"] == "restarting")
    assert within(30, lambda: server.engine_ready_asked > asked)
    server.engine_ready()
    assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}).status_code == 200


def test_who_was_stopped_does_not_blame_the_router() -> None:
    """What the router has said meanwhile may still be in the inbox when the first request is read."""
    with http_server() as server:
        server.answer = echo
        server.send(LoadReport(0, 0, 0, 512, 0, 0, 0, 0, 0, 0))
        assert within(30, lambda: server.metric("kv_cache_slots_total") == 512)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(SILENCE_S + 0.5)
        server.process.send_signal(signal.SIGCONT)
        assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}).status_code == 200


# ---------------------------------------------------------------- the end


def test_sigterm_lets_running_requests_finish() -> None:
    with http_server() as server:
        server.answer = three_tokens
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={"prompt": "Hi", "stream": True}, timeout=30
        ) as response:
            lines = response.iter_lines()
            next(lines)
            server.terminate()
            server.terminate()  # the whole group's beside the launcher's
            expected = {"status": "draining"}
            assert within(30, lambda: httpx.get(server.url + "/health").json() == expected)
            refused = server.post("/v1/completions", {"prompt": "Hi"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            end(server, server.requests[0])
            rest = "".join(lines)
        assert '"text":"end"' in rest
        assert rest.endswith("data: [DONE]")
        assert server.process.wait(30) == 0


def test_the_drain_is_bounded() -> None:
    with http_server(shutdown_timeout=0.5) as server:
        server.answer = three_tokens
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={"prompt": "Hi", "stream": True}, timeout=30
        ) as response:
            server.terminate()
            text = response.read().decode()
        assert "shutting down" in text
        assert text.endswith("data: [DONE]\n\n")
        assert server.process.wait(30) == 0
