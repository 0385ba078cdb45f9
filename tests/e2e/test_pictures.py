"""Pictures through a whole server: transformers' answers, a visual server that is killed, and what is left behind."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.clients import within
from tests.support.accuracy import log_softmax
from tests.support.picture_fixture import MODEL, PICTURES, picture_cases
from tests.support.server import Server, running_server

pytestmark = pytest.mark.cpu_engine("which alone computes pictures")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(MODEL, "--mmproj", "auto", "--max-total-tokens", "4096") as running:
        yield running


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
    case = picture_cases()[name]
    answer = ask(server, name, max_tokens=1, logprobs=True, top_logprobs=5, return_tokens_as_token_ids=True)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["usage"]["prompt_tokens"] == len(case.tokens)
    truth = log_softmax(case.truth["logits"])[-1]
    (first,) = found["choices"][0]["logprobs"]["content"]
    top = {int(one["token"].removeprefix("token_id:")): one["logprob"] for one in first["top_logprobs"]}
    assert set(top) == set(np.argsort(-truth)[:5].tolist())
    assert all(math.isclose(logprob, truth[token], abs_tol=0.02) for token, logprob in top.items())


def test_a_visual_server_that_is_killed(server: Server) -> None:
    """Another one encodes what waits; nothing is left of the embeddings."""
    texts = [ask(server, name).json()["choices"][0]["message"] for name in PICTURES]
    server.named("visualserver").kill()
    again = [ask(server, name) for name in PICTURES]
    assert [answer.json()["choices"][0]["message"] for answer in again] == texts
    assert within(60, lambda: not list((server.runtime_dir / "spans").iterdir()))


def test_no_picture(server: Server) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"GIF8 no more").decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}]}
    answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 400
    assert "the picture is in no known format; PNG, JPEG, WEBP, GIF are read" in answer.text
