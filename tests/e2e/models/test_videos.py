"""A video through a whole server: it is encoded once, and later turns find it in the prefix cache."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.pictures.picture_fixture import MODEL
from tests.support.pictures.video_file import video_file
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--mmproj", "auto", "--max-total-tokens", "4096", "--video-max-tokens", "256")
    with running_server(MODEL, *flags) as running:
        yield running


def part(data: bytes, **settings: float) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
    return {"type": "video_url", "video_url": {"url": url}} | settings


def ask(server: Server, *content: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": [*content]}], "max_tokens": 4, "temperature": 0} | more
    return httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=120)


def test_a_conversation(server: Server) -> None:
    """Three seconds of 96 x 160 pixels: three times two frames of 15 tokens."""
    video = part(video_file([8 * index for index in range(30)]))
    question = {"type": "text", "text": "What happens?"}
    first = ask(server, video, question)
    assert first.status_code == 200, first.text
    before = server.metrics()
    again = ask(server, video, question)
    after = server.metrics()
    assert again.json()["choices"][0]["message"] == first.json()["choices"][0]["message"]
    usage = again.json()["usage"]
    alone = ask(server, question).json()["usage"]["prompt_tokens"]
    # Each two frames have a time before them, and two tokens around them.
    assert 3 * 15 + 3 * 2 + 3 * 6 <= usage["prompt_tokens"] - alone <= 3 * 15 + 3 * 2 + 3 * 16
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    for name, count in (("pictures_total", 1), ("picture_cache_hits_total", 1)):
        assert after[f"moeserve:{name}"] - before[f"moeserve:{name}"] == count
    other = ask(server, part(video_file([8 * index for index in range(30)]), fps=1), question)
    assert other.json()["usage"]["prompt_tokens"] != usage["prompt_tokens"]
    assert within(60, lambda: not list((server.runtime_dir / "spans").iterdir()))


def test_a_video_that_cannot_be_read(server: Server) -> None:
    visual = server.named("visualserver").pid
    answer = ask(server, part(video_file([0] * 9)[:-400]))
    assert answer.status_code == 400
    assert "the video cannot be read" in answer.json()["error"]["message"]
    assert server.named("visualserver").pid == visual
