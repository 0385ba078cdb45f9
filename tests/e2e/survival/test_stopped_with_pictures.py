"""The visual server is stopped (SIGSTOP) or killed, alone and together with each other process of a server that sees:
/health says what is true, texts and pictures are answered again, no counter falls. All pairs take ten minutes."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.e2e.survival.lost_processes import ACTIONS, FLAGS, NAMES, Tried, try_out
from tests.support.pictures.picture_fixture import MODEL
from tests.support.servers.server import Server

pytestmark = pytest.mark.cpu_engine("a GPU's worker takes seconds to start again")
OTHERS = [name for name in NAMES if name != "launcher"]
PAIRS = [
    (("visualserver", how), (other, what))
    for other in [*OTHERS, "launcher"]
    for how in ACTIONS
    for what in ACTIONS
]


class Seeing(Tried):
    """A server that is asked about a new picture, too. /health speaks of texts: it is 200 without a visual server."""

    def keeps_healths_word(self) -> bool:
        try:
            return super().ask(self.patience_s) == self.answers[:-1]
        except (httpx.HTTPError, httpx.StreamError):
            return False

    def ask(self, timeout: float) -> list[Any]:
        written = io.BytesIO()
        Image.frombytes("RGB", (48, 48), os.urandom(48 * 48 * 3)).save(written, "PNG")
        url = "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{self.server.base_url}/v1/chat/completions", json=body, timeout=timeout)
        return [*super().ask(timeout), answer.status_code]


@pytest.fixture(scope="module")
def begin() -> Iterator[Callable[[], Tried]]:
    """A server that is well: the one of the test before, if it has come through."""
    current: list[Tried] = []

    def well() -> Tried:
        if not current or not (current[-1].has_come_through and current[-1].is_whole()):
            for tried in current:
                tried.server.kill()
            server = Server(MODEL, "--mmproj", "auto", "--max-total-tokens", "4096", *FLAGS)
            current.append(Seeing(server, names=(*NAMES, "visualserver")))
            current[-1].begin()
        return current[-1]

    yield well
    for tried in current:
        tried.server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", ACTIONS)
def test_the_visual_server(begin: Callable[[], Tried], how: str) -> None:
    try_out(begin(), ("visualserver", how))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_visual_server_and_another(begin: Callable[[], Tried], pair: tuple[tuple[str, str], ...]) -> None:
    try_out(begin(), *pair)
