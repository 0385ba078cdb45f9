"""Requests for which the router's queue has no room are refused before anything is done for them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from moeserve.messages.schema import RequestError
from tests.support.servers.http_harness import HttpServer, http_server, silence
from tests.support.servers.waiting import within

QUEUED = 64


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
