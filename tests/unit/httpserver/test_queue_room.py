"""Requests for which the router's queue has no room are refused before anything is done for them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from moeserve.httpserver.generation.engine.queue_room import QueueRoom
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.beams import BeamParams
from moeserve.messages.refusal import Refusal
from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.messages.schema import GenerateRequest, RequestError
from tests.support.http_harness import HttpServer, http_server, silence
from tests.support.waiting import within

RUNNING = 8  # requests at once, of the harness's engine
QUEUED = 64


def request(id: int, key: str, beams: BeamParams | None = None) -> GenerateRequest:
    prompt = array("i", [1]).tobytes()
    return GenerateRequest(id, prompt, SamplingParams(1), TextOptions(), 0.0, key_name=key, beams=beams)


def refusal(room: QueueRoom, key: str, wanted: int) -> ApiError | None:
    try:
        room.check(key, wanted, RUNNING)
    except ApiError as error:
        return error
    return None


def test_only_what_the_router_would_refuse_is_refused() -> None:
    room = QueueRoom(QUEUED)
    assert refusal(room, "", QUEUED + RUNNING) is None
    assert refusal(room, "", QUEUED + RUNNING + 1) is not None
    held = [request(id, "a") for id in range(30)]
    for one in held:
        room.joined(one)
    # Of two keys with the next one's each has a third of the queue, of one a half.
    assert refusal(room, "a", QUEUED // 2 + RUNNING - 30) is None
    error = refusal(room, "a", QUEUED // 2 + RUNNING - 30 + 1)
    assert error is not None
    assert (error.status, error.refusal, error.retry_after) == (503, Refusal.QUOTA, 1)
    assert refusal(room, "b", QUEUED // 3) is None
    room.refused(retry_after=7)
    error = refusal(room, "a", 1000)
    assert error is not None
    assert (error.refusal, error.retry_after) == (Refusal.QUEUE_FULL, 7)
    for one in held:
        room.left(one)
    assert room.is_empty
    assert refusal(room, "a", QUEUED // 2 + RUNNING) is None


def test_a_search_is_one_request_of_the_router() -> None:
    room = QueueRoom(QUEUED)
    for choice in range(100):
        room.joined(request(choice, "", BeamParams(1, choice, 100, 100)))
    assert refusal(room, "", QUEUED + RUNNING - 1) is None


@pytest.fixture(scope="module")
def keyed() -> Iterator[HttpServer]:
    with http_server(api_key=("a", "b"), max_num_queued_reqs=QUEUED) as running:
        running.answer = silence
        yield running


def ask(server: HttpServer, key: str, n: int, **more: object) -> httpx.Response:
    body = {"prompt": "Hi", "n": n, "max_tokens": 4, "temperature": 1} | more
    return httpx.post(server.url + "/v1/completions", json=body, headers={"x-api-key": key}, timeout=30)


def test_a_full_queue_is_told_before_the_work(keyed: HttpServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(ask, keyed, "a", QUEUED // 2)
        assert within(30, lambda: len(keyed.requests) == QUEUED // 2)
        process = psutil.Process(keyed.process.pid)
        before = sum(process.cpu_times()[:2])
        for _ in range(20):
            refused = ask(keyed, "a", QUEUED // 2, logit_bias={str(i): -1 for i in range(200)})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "overloaded"
            assert refused.headers["retry-after"] == "1"
        assert sum(process.cpu_times()[:2]) - before < 10
        assert len(keyed.requests) == QUEUED // 2, "the router has been asked"
        pool.submit(ask, keyed, "b", 1)
        assert within(30, lambda: len(keyed.requests) == QUEUED // 2 + 1)
        for one in list(keyed.requests):
            keyed.send(RequestError(one.id, 503, "busy", retry_after=3))
    assert ask(keyed, "a", QUEUED * 3).headers.get("retry-after") is None  # never fits: 400
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, keyed, "a", QUEUED // 2)
        assert within(30, lambda: len(keyed.requests) == QUEUED + 1)
        assert ask(keyed, "a", QUEUED // 2).headers["retry-after"] == "3"  # as the router has said
        keyed.begin_anew()
        asked.result()
