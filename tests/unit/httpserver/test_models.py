"""The list of models, and the description of the API."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from anthropic import Anthropic
from openai import OpenAI

from tests.support.http_harness import CONTEXT, NAME, HttpServer


def test_models_and_openapi(server: HttpServer) -> None:
    client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30)
    (card,) = client.models.list().data
    assert card.id == NAME
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] == CONTEXT
    assert client.models.retrieve(NAME).id == NAME
    assert httpx.get(server.url + "/v1/models/other").status_code == 404
    document = httpx.get(server.url + "/openapi.json")
    schemas = document.json()["components"]["schemas"]
    referred = {ref.rsplit("/", 1)[1] for ref in json_refs(document.json())}
    assert "CompletionRequest" in referred
    assert referred <= schemas.keys()
    assert schemas["CompletionRequest"]["properties"]["temperature"]["maximum"] == 2


def test_the_examples_of_openapi_are_answered(server: HttpServer) -> None:
    """They are what /docs sends when somebody tries a path. Adapters need --lora-dir, and a folder."""
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    examples = {
        path: methods["post"]["requestBody"]["content"]["application/json"]["example"]
        for path, methods in paths.items()
        if "post" in methods and not path.endswith("_lora_adapter")
    }
    statuses = {path: server.post(path, body).status_code for path, body in examples.items()}
    assert len(statuses) > 10
    assert statuses == dict.fromkeys(statuses, 200)


def test_anthropics_client_reads_the_models(server: HttpServer) -> None:
    client = Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30)
    page = client.models.list()
    (card,) = page.data
    assert (card.id, card.type, card.display_name, card.max_input_tokens) == (NAME, "model", NAME, CONTEXT)
    assert abs(datetime.now(UTC) - card.created_at) < timedelta(hours=1)
    assert (page.has_more, page.first_id, page.last_id) == (False, NAME, NAME)
    assert client.models.retrieve(NAME) == card


def json_refs(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for inner in node:
            yield from json_refs(inner)
