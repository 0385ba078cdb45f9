"""Bodies of any content type are JSON, but not those that a browser sends for a page of another site."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from moeserve.httpserver.app import openapi_document
from tests.support.servers.http_harness import NAME, HttpServer, http_server

CURL: Final = "application/x-www-form-urlencoded"  # what `curl -d` says of every body
FORM_TYPES: Final = (CURL, "text/plain; charset=utf-8", "multipart/form-data; boundary=x", None)
CHAT: Final = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
OLLAMA: Final = {"model": NAME, "stream": False, "options": {"num_predict": 2}}
ASKED: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": NAME, "messages": CHAT["messages"]},
    "/generate": {"inputs": "Hi", "parameters": {"max_new_tokens": 2}},
    "/generate_stream": {"inputs": "Hi", "parameters": {"max_new_tokens": 2}},
    "/completion": {"prompt": "Hi", "n_predict": 2},
    "/apply-template": {"messages": CHAT["messages"]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/api/chat": OLLAMA | {"messages": CHAT["messages"]},
    "/api/generate": OLLAMA | {"prompt": "Hi"},
    "/api/show": {"model": NAME},
    "/api/pull": {"model": NAME},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/v1/responses/{response_id}/cancel": {},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/v1/files": {},
    "/v1/batches": {},
    "/v1/batches/{batch_id}/cancel": {},
    "/v1/messages/batches": {},
    "/v1/messages/batches/{batch_id}/cancel": {},
    "/v1/mcp/servers/{name}/tools": {},
    "/v1/mcp/servers/{name}/call": {"tool": "add"},
}


def without_its_flag(path: str) -> tuple[int, str]:
    """The status of a route's answer, and what it names where the route needs a flag, another model or an answer."""
    needs = {
        "/api/pull": (403, "--pull"),
        "/infill": (400, "fill-in-the-middle"),
        "/v1/responses/{response_id}/cancel": (404, "response"),
    }
    if path in needs:
        return needs[path]
    if "/mcp/" in path:
        return 404, "--mcp-servers"
    if path.endswith("_lora_adapter"):
        return 403, "--lora-dir"
    return (404, "--batch-dir") if "batches" in path or path == "/v1/files" else (200, "")


@pytest.fixture(scope="module")
def keyed() -> Iterator[HttpServer]:
    with http_server(api_key=("k",), allowed_origin=("https://chat.example.com",)) as running:
        yield running


def post(server: HttpServer, path: str, content_type: str | None, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if content_type is not None:
        names["content-type"] = content_type
    return httpx.post(server.url + path, content=json.dumps(ASKED[path]), headers=names, timeout=30)


def test_every_route_with_a_body_is_tried() -> None:
    paths = openapi_document()["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} == set(ASKED)


@pytest.mark.parametrize("path", ASKED)
def test_a_body_needs_no_content_type(server: HttpServer, path: str) -> None:
    for content_type in (*FORM_TYPES, "application/json", "application/octet-stream"):
        response = post(server, path, content_type)
        status, flag = without_its_flag(path)
        assert response.status_code == status, (content_type, response.text)
        assert flag in response.text


@pytest.mark.parametrize("path", ASKED)
def test_pages_of_other_sites_may_not_send_what_a_browser_does_not_ask_for(
    server: HttpServer, path: str
) -> None:
    before = len(server.requests)
    for content_type in FORM_TYPES:
        for headers in (
            {"origin": "https://evil.example"},
            {"origin": "null"},  # a file, a sandboxed frame, a page without a referrer
            {"origin": server.url.replace("http://127.0.0.1", "http://localhost")},
            {"origin": server.url, "sec_fetch_site": "cross-site"},
            {"sec_fetch_site": "same-site"},  # another port of this machine
            {"origin": "https://evil.example", "sec_fetch_site": "none"},
        ):
            refused = post(server, path, content_type, **headers)
            assert refused.status_code == 403, (content_type, headers, refused.text)
            assert "application/json" in refused.text
            assert "--allowed-origin" in refused.text
    assert len(server.requests) == before


def test_a_page_of_the_servers_own_and_what_is_no_page(server: HttpServer) -> None:
    for headers in (
        {"origin": server.url, "sec_fetch_site": "same-origin"},
        {"origin": server.url},
        {"sec_fetch_site": "none"},
        {"sec_fetch_mode": "cors"},  # node's fetch, which sends a string as text/plain
    ):
        assert post(server, "/v1/completions", "text/plain", **headers).status_code == 200, headers
    # A browser has asked before it sends this, and an extension need not ask.
    said = post(server, "/v1/completions", "application/json", origin="chrome-extension://abc")
    assert said.status_code == 200


def test_allowed_origins_and_keys(keyed: HttpServer) -> None:
    for origin, status in (("https://chat.example.com", 200), ("https://evil.example", 403)):
        said = post(keyed, "/v1/completions", None, origin=origin, x_api_key="k")
        assert said.status_code == status
        assert post(keyed, "/v1/completions", None, origin=origin).status_code == 401


def test_what_is_no_json_is_a_400(server: HttpServer) -> None:
    for content in (b"prompt=Hi&max_tokens=2", b"%7B%22prompt%22%3A%22Hi%22%7D", b""):
        said = httpx.post(server.url + "/v1/completions", content=content, headers={"content-type": CURL})
        assert (said.status_code, said.json()["error"]["code"]) == (400, "invalid_json")
