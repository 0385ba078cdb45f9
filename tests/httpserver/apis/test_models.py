"""The list of models, and the description of the API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx

from tests.support.clients.official_clients import openai_client
from tests.support.servers.engine_messages import CONTEXT
from tests.support.servers.http_harness import NAME, HttpServer


def test_models_and_openapi(server: HttpServer) -> None:
    client = openai_client(server.url)
    (card,) = client.models.list().data
    assert card.id == NAME
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] == card.model_extra["context_length"] == CONTEXT
    assert client.models.retrieve(NAME).id == NAME
    assert httpx.get(server.url + "/v1/models/other").status_code == 404
    document = httpx.get(server.url + "/openapi.json")
    schemas = document.json()["components"]["schemas"]
    referred = {ref.rsplit("/", 1)[1] for ref in json_refs(document.json())}
    assert "CompletionRequest" in referred
    assert referred <= schemas.keys()
    assert schemas["CompletionRequest"]["properties"]["temperature"]["maximum"] == 2


def test_the_examples_of_openapi_are_answered(server: HttpServer) -> None:
    """They are what /docs sends when somebody tries a path. Adapters need --lora-dir, and a folder; files and batches
    need --batch-dir, downloads --pull allow, MCP --mcp-servers, /infill a model for code; and the answer to be
    cancelled is not there."""
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    examples = {
        path: methods["post"]["requestBody"]["content"]["application/json"]["example"]
        for path, methods in paths.items()
        if "post" in methods and not path.endswith("_lora_adapter")
        if "/batches" not in path and "/mcp/" not in path
        if path not in ("/v1/files", "/api/pull", "/infill", "/v1/responses/{response_id}/cancel")
    }
    statuses = {path: server.post(path, body).status_code for path, body in examples.items()}
    assert len(statuses) > 10
    assert statuses == dict.fromkeys(statuses, 200)


def json_refs(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for inner in node:
            yield from json_refs(inner)
