"""Ten turns about one picture: encoded once, and read again from the prefix cache; also behind a worker that was killed
and, from the disk tier, behind a restart."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.support.pictures.picture_fixture import MODEL
from tests.support.servers.server import GREEDY, Server, running_server

TURNS = 10
SHARE = 0.95  # of the prompt tokens of all turns but a conversation's first


def picture() -> str:
    """A screen of 1920 x 1080 pixels, which takes 2,040 tokens."""
    rows, columns = np.mgrid[:1080, :1920]
    pixels = np.stack([rows // 4, columns // 5, (rows + columns) // 9], 2).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class Conversation:
    def __init__(self) -> None:
        shown = {"type": "image_url", "image_url": {"url": picture()}}
        self.messages: list[dict[str, Any]] = [
            {"role": "user", "content": [shown, {"type": "text", "text": "What is it?"}]}
        ]

    def ask(self, server: Server) -> tuple[int, int]:
        """Returns the turn's prompt tokens, and how many of them came from the cache."""
        body = {"messages": self.messages, "max_tokens": 24, "ignore_eos": True}
        answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        self.messages += [found["choices"][0]["message"], {"role": "user", "content": "And further?"}]
        usage = found["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def share(turns: list[tuple[int, int]]) -> float:
    prompts, cached = (sum(column) for column in zip(*turns, strict=True))
    return float(cached / prompts)


def encoded(server: Server) -> float:
    """Pictures that the tower has encoded, without those that it had already."""
    metrics = server.metrics()
    return metrics["moeserve:pictures_total"] - metrics["moeserve:picture_cache_hits_total"]


@pytest.mark.slow  # 2,040 tokens of a tower in float32, and two starts
def test_ten_turns(tmp_path: Path) -> None:
    flags = ("--mmproj", "auto", "--max-total-tokens", "8192", "--kv-disk", str(tmp_path / "tier"))
    more = ("--kv-disk-gib", "0.5", *GREEDY)
    talk = Conversation()
    with running_server(MODEL, *flags, *more) as server:
        first, *turns = [talk.ask(server) for _ in range(TURNS)]
        print(f"ten turns: {first}, {turns}, {share(turns):.3f}")
        assert first[0] > 2000
        assert encoded(server) == 1
        assert share(turns) >= SHARE
        server.named("worker").kill()
        turns = [talk.ask(server) for _ in range(TURNS)]
        print(f"behind a killed worker: {turns}, {share(turns):.3f}")
        assert encoded(server) == 1
        assert share(turns) >= SHARE
    with running_server(MODEL, *flags, *more) as server:
        turns = [talk.ask(server) for _ in range(TURNS)]
        print(f"behind a restart: {turns}, {share(turns):.3f}")
        assert encoded(server) == 1
        assert share(turns) >= SHARE
