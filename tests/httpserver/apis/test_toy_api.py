"""An API is a folder and a line of `app.APIS`: a toy one is served by the real process and touches nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.servers.http_harness import NAME, HttpServer, http_server

HEADERS = {"authorization": "Bearer key", "x-request-id": "id-1"}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server(module="tests.support.servers.toy_api", api_key=("key",)) as running:
        yield running


def test_a_toy_api_is_served(server: HttpServer) -> None:
    ids = server.tokenizer.encode("The quick brown fox")
    answers = [
        server.post("/toy/ask", {"ask": "The quick brown fox", "words": 2}, headers=HEADERS) for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    said = server.tokenizer.decode(ids[:2])
    assert answers[0].json() == {"said": said, "before": [NAME]}
    assert answers[1].json() == {"said": said, "before": [NAME, "The quick brown fox"]}
    assert answers[0].headers["toy-id"] == answers[0].headers["x-request-id"] == "id-1"
    (request, _) = server.requests
    assert (request.sampling.max_tokens, request.key_name) == (2, "key-1")


def test_its_errors_have_its_own_shape_and_no_other_s(server: HttpServer) -> None:
    def error(path: str, **body: object) -> Any:
        return server.post(path, body, headers=HEADERS).json()

    wrong = "words: must be a valid integer, got 'two'"
    assert error("/toy/ask", ask="a", words="two") == {"oops": wrong, "status": 400, "id": "id-1"}
    missing = {"oops": "POST /toy/none: not found", "status": 404, "id": "id-1"}
    assert error("/toy/none") == missing
    assert set(error("/v1/completions")) == {"error"}
    assert set(error("/v1/messages")) == {"type", "error", "request_id"}


def test_its_open_path_needs_no_key(server: HttpServer) -> None:
    assert httpx.get(server.url + "/toy/ping").json() == {"pong": True}
    refused = server.post("/toy/ask", {"ask": "a"}, headers={"x-request-id": "id-2"})
    assert (refused.status_code, refused.json()["status"], refused.json()["id"]) == (401, 401, "id-2")
