"""Pictures through a whole server: transformers' answers, a visual server that is killed, and what is left behind."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeserve.processes.tower_page import TowerPage
from tests.e2e.completions import streamed
from tests.support.pictures.picture_fixture import (
    FIRST_TOKEN,
    MODEL,
    PICTURES,
    check_first_token,
    picture_cases,
)
from tests.support.servers.server import GREEDY, REPOSITORY, Server, running_server
from tests.support.servers.waiting import within

GUIDE = REPOSITORY / "docs" / "how-to" / "ask-about-pictures.md"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(MODEL, "--mmproj", "auto", "--max-total-tokens", "4096", *GREEDY) as running:
        yield running


def from_cache(server: Server, name: str) -> Any:
    """The answer once all of the prompt but its last token is in the cache: a GPU computes other bits before."""
    for _ in range(2):
        message = ask(server, name).json()["choices"][0]["message"]
    return message


def ask(server: Server, name: str, **more: Any) -> httpx.Response:
    """The question of the fixture."""
    data = base64.b64encode(picture_cases()[name].path.read_bytes()).decode()
    content = [
        {"type": "text", "text": "Look at this: "},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": " What does the keeper see?"},
    ]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0} | more
    return httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=120)


@pytest.mark.parametrize("name", PICTURES)
def test_the_first_token_is_transformers(server: Server, name: str) -> None:
    answer = ask(server, name, **FIRST_TOKEN)
    assert answer.status_code == 200, answer.text
    check_first_token(answer.json(), picture_cases()[name])


def test_a_visual_server_that_is_killed(server: Server) -> None:
    """Another one encodes what waits; nothing is left of the embeddings."""
    texts = [from_cache(server, name) for name in PICTURES]
    server.named("visualserver").kill()
    again = [ask(server, name) for name in PICTURES]
    assert [answer.json()["choices"][0]["message"] for answer in again] == texts
    assert within(60, lambda: not list((server.runtime_dir / "spans").iterdir()))


def test_encoding_beside_an_answer(server: Server) -> None:
    """The visual server knows of open requests, and of none when they have ended."""
    page = TowerPage(server.runtime_dir / "tower-page")
    with closing(streamed(server, prompt="A keeper", max_tokens=1500)) as events:
        next(events)
        assert page.open_requests >= 1
        assert ask(server, "landscape", max_tokens=1).status_code == 200
    assert within(10, lambda: page.open_requests == 0)
    assert page.encoding == (0.0, 0.0)


def counters(server: Server) -> dict[str, float]:
    return {name: value for name, value in server.metrics().items() if name.endswith("_total")}


@pytest.mark.slow  # 20 s; one that is killed is tested always
def test_a_visual_server_that_is_stopped() -> None:
    """Texts are answered meanwhile, and /health says that they can be. The picture is answered when the launcher has
    replaced what does not answer; no counter falls."""
    with running_server(
        MODEL, "--mmproj", "auto", "--max-total-tokens", "4096", "--step-timeout", "4"
    ) as server:
        expected = from_cache(server, "square")
        before, stopped = counters(server), server.named("visualserver")
        stopped.suspend()
        with ThreadPoolExecutor() as threads:
            picture = threads.submit(ask, server, "square")
            body = {"prompt": "A keeper", "max_tokens": 4}
            text = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60)
            health = httpx.get(f"{server.base_url}/health", timeout=5)
            assert (text.status_code, health.status_code) == (200, 200)
            assert not picture.done()
            answer = picture.result(120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"] == expected
        assert within(10, lambda: not stopped.is_running())
        after = counters(server)
        assert {name for name, value in before.items() if after.get(name, 0) < value} == set()
        assert after["moeserve:pictures_total"] == before["moeserve:pictures_total"] + 1


def test_the_program_of_the_guide(server: Server, tmp_path: Path) -> None:
    # The second shows a part with a video, which this model does not take: tests/e2e/models/test_videos.py.
    program, _ = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "sign.png").write_bytes(picture_cases()["landscape"].path.read_bytes())
    assert "http://localhost:8000" in program
    program = program.replace("http://localhost:8000", server.base_url)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_no_picture(server: Server) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"GIF8 no more").decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}]}
    answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 400
    assert "the picture is in no known format; PNG, JPEG, WEBP, GIF are read" in answer.text
