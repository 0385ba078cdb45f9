"""Paths and methods that there are not: the answer says which were meant."""

from __future__ import annotations

import httpx
import pytest


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    for response, status in ((client.get("/nothing"), 404), (client.get("/v1/completions"), 405)):
        assert response.status_code == status
        assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("//v1/completions", "/v1/completions"),
        ("/models", "/v1/models"),
    ],
)
def test_a_base_url_that_is_nearly_right_is_told(client: httpx.Client, given: str, meant: str) -> None:
    response = client.post(given, json={})
    assert response.status_code == 404
    assert f"did you mean {meant}? Look at the client's base URL" in response.text


@pytest.mark.parametrize(
    ("method", "path", "why"),
    [
        ("POST", "/v1/embeddings", "no embedding models"),
        ("GET", "/v1/realtime", "text only, over HTTP"),
        ("POST", "/v1/audio/transcriptions", "text only"),
        ("GET", "/v1/files/file-1/content", "--batch-dir"),
        ("POST", "/v1/messages/batches", "--batch-dir"),
        ("POST", "/v1/conversations", "previous_response_id"),
        ("GET", "/v1/chat/completions/chatcmpl-1", "previous_response_id"),
        ("POST", "/v1/responses/compact", "no compaction here"),
        ("POST", "/api/push", "with --model"),
    ],
)
def test_what_clients_know_and_is_not_there_is_told_with_the_reason(
    client: httpx.Client, method: str, path: str, why: str
) -> None:
    response = client.request(method, path)
    assert response.status_code in (404, 405)
    assert why in response.text


def test_an_unknown_path_has_no_reason(client: httpx.Client) -> None:
    assert client.get("/v1/embeddingsx").json()["error"]["message"] == "GET /v1/embeddingsx: not found"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nothing"])
def test_a_browsers_question_for_another_sites_page_is_told_what_allows_it(
    client: httpx.Client, path: str
) -> None:
    """The log showed a 405, for chat completions with a reason about stored ones."""
    response = client.options(path, headers={"Origin": "http://app.test"})
    assert response.status_code in (404, 405)
    message = response.json()["error"]["message"]
    assert "'http://app.test'" in message
    assert "--allowed-origin" in message


def test_options_without_an_origin_are_no_browsers_question(client: httpx.Client) -> None:
    """Load balancers and scanners ask so; the answer spoke of pages of 'other sites'."""
    response = client.options("/v1/models")
    assert response.status_code == 405
    assert response.json()["error"]["message"] == "OPTIONS /v1/models: method not allowed"
    assert response.headers["allow"]
