"""Answers through nginx as its package configures it (60 s without a byte end a request), whose prompts take five
minutes. The worker is stopped so long."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.completions import TEXT, running, waiting
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import free_port, within

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
PROMPT_S = 300
CONFIGURATION = """
pid {folder}/pid;
error_log {folder}/error.log;
daemon off;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass {url};
        }}
    }}
}}
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]


@pytest.fixture
def server(tiny_model: Path) -> Iterator[Server]:
    with running_server(tiny_model, "--step-timeout", str(2 * PROMPT_S)) as server:
        yield server


@pytest.fixture
def front(server: Server, tmp_path: Path) -> Iterator[str]:
    assert NGINX is not None
    port = free_port()
    file = tmp_path / "nginx.conf"
    file.write_text(CONFIGURATION.format(folder=tmp_path, port=port, url=server.base_url))
    process = subprocess.Popen([NGINX, "-p", str(tmp_path), "-c", str(file)], stdin=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        assert within(10, lambda: answers(url))
        yield url
    finally:
        process.terminate()
        process.wait(10)


def answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def ask(url: str, *, stream: bool) -> tuple[str, float]:
    """The whole body, and the seconds from the request to the first token."""
    body = {"prompt": TEXT, "max_tokens": 8, "ignore_eos": True, "stream": stream}
    text, start, first = "", time.monotonic(), 0.0
    with (
        httpx.Client(timeout=60) as client,  # between two reads, as nginx has it
        client.stream("POST", url + "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        for piece in response.iter_text():
            text += piece
            if not first and "choices" in text:
                first = time.monotonic() - start
    return text, first


@pytest.mark.timeout(2 * PROMPT_S)
def test_a_prompt_may_take_five_minutes(server: Server, front: str) -> None:
    worker = server.named("worker")
    worker.suspend()
    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(ask, front, stream=True)
        whole = pool.submit(ask, front, stream=False)
        assert within(20, lambda: running(server) + waiting(server) == 2)
        time.sleep(PROMPT_S)
        worker.resume()
        for answer in (streamed, whole):
            text, first = answer.result(60)
            assert first > PROMPT_S
            assert '"finish_reason":"length"' in text.replace(" ", "")
        comments = streamed.result()[0].split("data:")[0]
        assert comments.count(": at work") > PROMPT_S / 20
        assert streamed.result()[0].endswith("data: [DONE]\n\n")
