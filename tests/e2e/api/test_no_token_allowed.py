"""Requests whose masks leave no token: each ends with a clear error, and nobody else notices. On a folder in Hugging
Face's layout too, whose embedding lies in memory of its own: reading before it ended the worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.conftest import TINY_MODEL
from tests.e2e.completions import TEXT, completion, from_cache, is_empty
from tests.e2e.load.steady_streams import SteadyStreams
from tests.support.models.hugging_face_model import write_model
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

TOKENIZER = TextTokenizer.from_gguf(open_gguf(TINY_MODEL))
(OPEN,) = TOKENIZER.encode("<think>")
(CLOSE,) = TOKENIZER.encode("</think>")
ENDING = TOKENIZER.encode("\n</think>\n\n")
NEIGHBOURS = [token for token in ENDING if token != CLOSE]
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 80, "temperature": 0}
# `<think>` comes first; once its one token is over, the thought's ending is all that may follow.
CUT_SHORT: dict[str, Any] = HELLO | {
    "thinking_token_budget": 1,
    "min_tokens": 50,
    "logit_bias": {str(OPEN): 100},
}


@pytest.fixture(scope="module", params=[pytest.param("GGUF", marks=pytest.mark.slow), "Hugging Face folder"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model: Path = TINY_MODEL
    if request.param != "GGUF":
        model = tmp_path_factory.mktemp("model") / "tiny-moe"
        write_model(model)
    with running_server(model, "--max-model-len", "512") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_a_budget_whose_end_is_forbidden_is_refused_and_nobody_else_notices(
    served: Server, is_stream: bool
) -> None:
    expected = from_cache(served, prompt=TEXT)
    worker = served.named("worker")
    with SteadyStreams(served) as neighbour:
        assert within(30, lambda: bool(neighbour.texts))
        for _ in range(3):
            for token in NEIGHBOURS:
                body = CUT_SHORT | {"stop_token_ids": [token], "stream": is_stream}
                response = httpx.post(served.base_url + CHAT, json=body, timeout=60)
                assert response.status_code == 400, response.text
                error = response.json()["error"]
                assert error["param"] == "thinking_token_budget"
                for word in ("no token would be allowed", f"token {token}", "stop_token_ids", "min_tokens"):
                    assert word in error["message"]
        before = len(neighbour.texts)
        assert within(30, lambda: len(neighbour.texts) > before + 1)
    assert neighbour.error is None
    assert len(set(neighbour.texts)) == 1
    assert completion(served, prompt=TEXT) == expected
    assert served.named("worker").pid == worker.pid
    assert within(30, lambda: is_empty(served))


@pytest.mark.slow
@pytest.mark.parametrize("token", NEIGHBOURS)
def test_the_same_with_as_many_tokens_as_come_before_the_end_is_served(served: Server, token: int) -> None:
    """The opening and the budget's one token: what forbids the stop token is over when the ending comes."""
    answer = served.post(CHAT, CUT_SHORT | {"stop_token_ids": [token], "min_tokens": 2})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == token
