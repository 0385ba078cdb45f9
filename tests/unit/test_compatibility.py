"""docs/compatibility.md is true: every endpoint and field of it is sent to the real process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moeserve.httpserver.protocol.chat import ChatCompletionRequest
from moeserve.httpserver.protocol.completions import CompletionRequest
from moeserve.httpserver.protocol.messages import CountTokensRequest, MessagesRequest
from moeserve.httpserver.protocol.openai_responses import ResponsesRequest
from moeserve.httpserver.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tests.unit.http_harness import NAME, HttpServer, http_server

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
HI: Any = [{"role": "user", "content": "Hi"}]
REQUESTS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": HI, "max_tokens": 1}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi", "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, {"model": NAME, "messages": HI, "max_tokens": 1}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"model": NAME, "messages": HI}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
# None of them is what a refused field takes by exception.
SOMETHING: list[Any] = [1, 2.5, "some text", ["a", "b"], {"a": {"b": 1}}]


def section(title: str) -> list[tuple[str, str]]:
    """(name, status) of each row of the table under the title."""
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `([^`]+)` \|.*?\| (supported|refused|accepted) \|", text, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| `", text, re.MULTILINE)), "a row without a status"
    return rows


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in model.model_fields.items()}


@pytest.mark.parametrize("path", REQUESTS)
def test_every_field_is_listed_with_what_it_is(path: str) -> None:
    rows = section(f"`POST {path}`")
    names = [name for name, _ in rows]
    assert len(names) == len(set(names))
    fields = fields_of(REQUESTS[path][0])
    assert fields.keys() <= set(names), "fields that the page does not have"
    for name, status in rows:
        info = fields.get(name)
        idle = info is not None and (info.description or "").lower().find("has no effect") >= 0
        assert (status == "accepted") == idle, name
        if status != "refused":
            assert info is not None, name


@pytest.mark.parametrize("path", REQUESTS)
def test_refused_fields_are_refused_by_name(server: HttpServer, path: str) -> None:
    server.requests.clear()
    client = httpx.Client(base_url=server.url, timeout=30)
    for name, status in section(f"`POST {path}`"):
        if status != "refused":
            continue
        for value in SOMETHING:
            response = client.post(path, json=REQUESTS[path][1] | {name: value})
            assert response.status_code == 400, f"{name}={value}: {response.status_code}"
            assert name in response.json()["error"]["message"]
    assert server.requests == []


def test_endpoints_are_there_or_not(server: HttpServer) -> None:
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    there = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    rows = section("Endpoints")
    assert {name for name, status in rows if status == "supported"} == there | {"GET /openapi.json"}
    for name, status in rows:
        method, path = name.split()
        if status == "refused":
            response = httpx.request(method, server.url + path.replace("{response_id}", "resp_x"), json={})
            assert response.status_code in (404, 405), name
