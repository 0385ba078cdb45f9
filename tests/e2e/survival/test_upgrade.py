"""`moeserve reload`: the next server beside the one before, on the same sockets; nobody who talks to them notices."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.completions import TEXT, completion, health_url, is_empty, streamed
from tests.e2e.survival.reloading import reload
from tests.support.servers.server import Server
from tests.support.servers.waiting import within

TOKENS = 200


def answer(server: Server, prompt: str) -> tuple[str, Any]:
    """The text of a stream, and why it ended."""
    events = [*streamed(server, prompt=prompt, max_tokens=TOKENS)]
    choices = [event["choices"][0] for event in events if event.get("choices")]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


@contextmanager
def streaming(server: Server, prompts: list[str]) -> Iterator[list[list[tuple[str, Any]]]]:
    """The answers to each prompt, which are asked for again and again, each on a connection of its own."""
    found: list[list[tuple[str, Any]]] = [[] for _ in prompts]
    stop = threading.Event()

    def ask(index: int) -> None:
        while not stop.is_set():
            found[index].append(answer(server, prompts[index]))
            assert httpx.get(server.base_url + "/health/ready", timeout=30).status_code == 200

    with ThreadPoolExecutor(len(prompts)) as pool:
        asking = [pool.submit(ask, index) for index in range(len(prompts))]
        yield found
        stop.set()
        for one in asking:
            one.result()


@pytest.fixture
def own_server(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    model = shutil.copy(tiny_model, tmp_path / "model.gguf")
    running = Server(Path(model), "--max-total-tokens", "131072", "--health-port", "0")
    yield running
    running.kill()


@pytest.mark.cpu_engine("answers are bit-equal whatever shares their steps")
@pytest.mark.slow  # tests/processes/test_launcher_upgrades.py has what the launcher does
@pytest.mark.parametrize("count", [4, 32])
def test_an_upgrade_ends_no_stream_and_refuses_nobody(own_server: Server, count: int) -> None:
    prompts = [f"{i} {TEXT}" for i in range(count)]
    expected = [answer(own_server, prompt) for prompt in prompts]
    before = own_server.processes()[1:]
    health = health_url(own_server)
    with streaming(own_server, prompts) as answers:
        result = reload(own_server)
        assert result.returncode == 0, own_server.log
        _, alive = psutil.wait_procs(before, timeout=30)
        assert alive == [], own_server.log
        assert httpx.get(health + "/health/ready", timeout=30).status_code == 200
    assert [set(texts) for texts in answers] == [{text} for text in expected]
    assert "did not finish" not in own_server.log
    assert within(30, lambda: is_empty(own_server))
    own_server.family = own_server.processes()
    assert own_server.stop() == 0, own_server.log
    assert own_server.survivors() == []
    assert not own_server.runtime_dir.exists()


@pytest.mark.slow
def test_a_failed_upgrade_leaves_the_server_as_it_was(own_server: Server, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").unlink()  # it is loaded; another could not be
    result = reload(own_server)
    assert result.returncode == 1
    assert "the one before goes on" in result.stderr
    assert completion(own_server, prompt=TEXT)["finish_reason"] == "length"
    assert own_server.processes() == own_server.family
    assert own_server.stop() == 0, own_server.log
    assert own_server.survivors() == []
    assert not own_server.runtime_dir.exists()
