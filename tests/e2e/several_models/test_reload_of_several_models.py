"""`moeserve reload` with several models: no answer ends early, and the next server loads in the memory that is free."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.several_models.two_models import PATIENCE_S, two_models
from tests.e2e.survival.reloading import reload
from tests.support.servers.server import running_server, stream_events, title_of
from tests.support.servers.waiting import within

SMALL_KV = ("--max-total-tokens", "4096")


@pytest.mark.slow  # five loads
@pytest.mark.timeout(900)
def test_reload_ends_no_answer_and_loads_behind_the_one_before(tmp_path: Path) -> None:
    """The next server has the new requests at once, and memory for a model when the one before has unloaded its own."""
    flags = [*two_models(tmp_path), *SMALL_KV, "--models-memory", "0.6"]
    with (
        running_server(None, *flags) as server,
        httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        (front,) = [one for one in server.processes() if title_of(one) == "moeserve: front"]
        body = {"model": "a", "stream": True, "max_tokens": 1500, "ignore_eos": True, "prompt": "Once"}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            events = stream_events(answer)
            next(events)
            asked = reload(server)
            assert asked.returncode == 0, asked.stderr + server.log
            short = {"model": "b", "prompt": "Once", "max_tokens": 2}
            waiting = pool.submit(
                httpx.post, f"{server.base_url}/v1/completions", json=short, timeout=PATIENCE_S
            )
            assert front.is_running()
            assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
        assert waiting.result().status_code == 200, waiting.result().text
        assert within(PATIENCE_S, lambda: not front.is_running())
        assert server.log.count("loading b") == 1
        second = reload(server)
        assert second.returncode == 0, second.stderr
        assert (
            httpx.post(f"{server.base_url}/v1/completions", json=short, timeout=PATIENCE_S).status_code == 200
        )
        server.family = server.processes()


@pytest.mark.slow  # three loads
@pytest.mark.timeout(900)
def test_reload_loads_at_once_in_the_memory_that_the_one_before_does_not_hold(tmp_path: Path) -> None:
    """However long its last answer takes: here that waits for a worker that is stopped."""
    flags = [*two_models(tmp_path), *SMALL_KV, "--models-memory", "2", "--step-timeout", "900"]
    with (
        running_server(None, *flags) as server,
        httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as client,
    ):
        front = server.named("front")
        body = {"model": "a", "stream": True, "max_tokens": 1500, "ignore_eos": True, "prompt": "Once"}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            events = stream_events(answer)
            next(events)
            worker = server.named("worker")
            worker.suspend()
            asked = reload(server)
            assert asked.returncode == 0, asked.stderr + server.log
            short = {"model": "b", "prompt": "Once", "max_tokens": 2}
            other = httpx.post(f"{server.base_url}/v1/completions", json=short, timeout=PATIENCE_S)
            assert other.status_code == 200, other.text
            assert front.is_running(), "its answer has not ended"
            worker.resume()
            assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
        assert within(PATIENCE_S, lambda: not front.is_running())
        server.family = server.processes()
