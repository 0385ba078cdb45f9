"""A thousand hostile pictures of one API key, through a whole server: no process is lost, no memory, and nothing of
another key's streams."""

from __future__ import annotations

import base64
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.support.pictures.broken_pictures import broken, whole_files
from tests.support.pictures.picture_fixture import MODEL
from tests.support.servers.server import GREEDY, Server, running_server, stream_events

PICTURES = 1000
CLIENTS = 8
STREAM = {"prompt": "A keeper", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}


def memory(server: Server) -> int:
    """Bytes of RAM of all processes."""
    return sum(process.memory_info().rss for process in server.processes())


def stream(server: Server) -> str:
    headers = {"Authorization": "Bearer two"}
    with (
        httpx.Client(timeout=120, headers=headers) as client,
        client.stream("POST", server.base_url + "/v1/completions", json=STREAM) as response,
    ):
        assert response.status_code == 200
        return "".join(event["choices"][0]["text"] for event in stream_events(response) if event["choices"])


def send(server: Server, data: bytes) -> int:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    headers = {"Authorization": "Bearer one"}
    body = {"messages": messages, "max_tokens": 1}
    answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, headers=headers, timeout=300)
    if answer.status_code == 400:
        assert "the picture" in answer.json()["error"]["message"]
    return answer.status_code


@pytest.mark.slow  # a minute: a thousand requests, of which some hundred are answered
def test_a_thousand() -> None:
    rng = random.Random(44)
    pixels = np.random.default_rng(5).integers(0, 256, (96, 160, 3), dtype=np.uint8)
    files = whole_files(Image.fromarray(pixels))
    keys = ("--api-key", "one", "--api-key", "two")
    with running_server(MODEL, "--mmproj", "auto", "--max-total-tokens", "8192", *keys, *GREEDY) as server:
        expected = stream(server)
        assert send(server, files[0]) == 200
        before, held = {process.pid for process in server.processes()}, memory(server)
        streams: list[str] = []
        done = threading.Event()

        def keep_streaming() -> None:
            while not done.is_set():
                streams.append(stream(server))

        with ThreadPoolExecutor(CLIENTS + 1) as threads:
            other = threads.submit(keep_streaming)
            try:
                hostile = [broken(rng, files) for _ in range(PICTURES)]
                statuses = list(threads.map(send, itertools.repeat(server), hostile))
            finally:
                done.set()
            other.result(120)
        grown = memory(server) - held
        print(f"{statuses.count(400)} refused; {len(streams)} streams; {grown / 2**20:.0f} MiB more")
        assert set(statuses) == {200, 400}
        assert PICTURES // 10 < statuses.count(400) < PICTURES
        assert len(streams) > 1
        assert set(streams) == {expected}
        assert {process.pid for process in server.processes()} == before
        assert all(psutil.pid_exists(pid) for pid in before)
        assert grown < 1 << 30
        assert send(server, files[0]) == 200
