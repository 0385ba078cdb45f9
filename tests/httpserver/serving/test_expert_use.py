"""/v1/experts in the real httpserver process: what it shows, what fails. And how seldom the engine is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import numpy as np
import pytest

from moeserve.httpserver.generation.engine import expert_use
from moeserve.httpserver.generation.engine.expert_use import ExpertUseFeed
from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.expert_disk import ExpertDiskCounts
from moeserve.messages.schema import EngineLost
from moeserve.messages.steps import ExpertUse
from moeserve.placement.heat import read_heat
from tests.support.router.virtual_time import Clock
from tests.support.servers.http_harness import NAME, TLS, HttpServer, http_server
from tests.support.servers.waiting import within

COUNTS = np.array([[5, 0, 2], [1, 6, 0]], np.int64)
ON_GPU = np.array([[1, 0, 1], [0, 2, 0]], np.uint8)  # of two GPUs
CACHE = ExpertCacheCounts(30, 10, 4, 4000)
ON_DISK = np.array([[0, 1, 0], [0, 0, 1]], np.uint8)
DISK = ExpertDiskCounts(hits=7, misses=3, bytes=900)
USE = ExpertUse(2, 3, 2, COUNTS.tobytes(), ON_GPU.tobytes(), CACHE, ON_DISK.tobytes(), DISK)


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


def get(server: HttpServer, path: str) -> httpx.Response:
    return server.get(path)


def test_a_get_with_an_encoding_of_no_body_is_answered(server: HttpServer) -> None:
    """While the engine is asked, the server waits for the client to leave, and finds no body to decode."""
    with ThreadPoolExecutor() as pool:
        address, headers = server.url + "/v1/experts", {"content-encoding": "gzip"}
        answer = pool.submit(httpx.get, address, headers=headers, verify=TLS)
        assert within(30, lambda: server.expert_use_asked == 1)
        server.send(USE)
        assert answer.result().status_code == 200


def test_what_it_shows(server: HttpServer, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(get, server, path) for path in ("/v1/experts", "/v1/experts/heat") * 4]
        answered = 0
        while not all(
            answer.done() for answer in answers
        ):  # asked again after half a second, if it takes so long
            if server.expert_use_asked > answered:
                answered = server.expert_use_asked
                server.send(USE)
            wait(answers, timeout=0.01)
        shown, heat = (answers[i].result() for i in (0, 1))
    assert shown.json() == {
        "object": "experts",
        "model": NAME,
        "layers": 2,
        "experts": 3,
        "experts_per_token": 2,
        "counts": COUNTS.tolist(),
        "gpu_experts": [[0, 2], [1]],
        "expert_gpus": [[0, -1, 0], [-1, 1, -1]],
        "disk_experts": [[1], [2]],
        "expert_cache": {"hits": 30, "misses": 10, "promotions": 4, "bytes": 4000},
        "expert_disk": {"hits": 7, "misses": 3, "bytes": 900},
    }
    assert heat.headers["content-disposition"] == 'attachment; filename="expert-heat.json"'
    (tmp_path / "heat.json").write_bytes(heat.content)
    assert read_heat(tmp_path / "heat.json", 2, 3).counts == COUNTS.tolist()
    assert read_heat(tmp_path / "heat.json", 2, 3).model == NAME


def test_an_engine_that_is_lost_fails_who_waits(server: HttpServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(get, server, "/v1/experts")
        assert within(30, lambda: server.expert_use_asked == 1)
        server.send(EngineLost(cause="fire"))
        failed = answer.result()
    assert failed.status_code == 503
    assert "fire" in failed.json()["error"]["message"]


def test_an_api_key_guards_it() -> None:
    with http_server(api_key=("secret",)) as server:
        for path in ("/v1/experts", "/v1/experts/heat"):
            assert get(server, path).status_code == 401


class Asked:
    """In the place of the line to the router: an engine that answers each request after `delay` seconds."""

    def __init__(self, delay: float) -> None:
        self.count = 0
        self.feed = ExpertUseFeed(self)  # type: ignore[arg-type]
        self._delay = delay

    async def send(self, _: object) -> None:
        self.count += 1
        asyncio.get_running_loop().call_later(self._delay, self.feed.received, USE)


def test_the_engine_is_asked_twice_a_second_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.now = 1.0  # a server does not start at 0
    monkeypatch.setattr(expert_use, "time", clock)
    asked = Asked(delay=0.01)

    async def client() -> None:
        while clock.now < 11:
            assert await asked.feed.latest() is USE
            await asyncio.sleep(0.05)

    async def crowd() -> None:
        await asyncio.gather(*(client() for _ in range(8)))

    clock.run(crowd())
    assert 18 <= asked.count <= 20
