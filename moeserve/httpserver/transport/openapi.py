"""Completes FastAPI's /openapi.json with the bodies that the routes read themselves, streams, errors, and the API
key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from moeserve.httpserver.transport.api_table import ApiTable

EVENT_STREAM: Final = "text/event-stream"
JSON_LINES: Final = "application/x-ndjson"

_SCHEMA_PATH: Final = "#/components/schemas/{model}"
_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of --api-key or --api-key-file."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}
_CLIENT_ERROR: Final = (
    "400: a wrong body; 401: no valid API key; 404: no such model or object; 413: a body that is too large; 415: a "
    "body that is not JSON."
)
_SERVER_ERROR: Final = (
    "503: loading, overloaded or draining, to be sent again; 500: an error of the server's."
)
_RETRY_AFTER: Final = {"description": "Seconds, with a 503.", "schema": {"type": "integer"}}


def documented(
    body: type[BaseModel],
    example: dict[str, Any],
    *,
    stream: type | None = None,
    media_type: str = EVENT_STREAM,
) -> dict[str, Any]:
    """Returns a route's `openapi_extra`. stream: the object in each event or line of its streams; `Api.streamed` must
    list it too, unless a route also returns it. example: the body that /docs sends by default; its "model" is replaced
    by the served model's name."""
    content = {"schema": _reference(body), "example": example}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": content}}}
    if stream is not None:
        extra["responses"] = {"200": {"content": {media_type: {"schema": _reference(stream)}}}}
    return extra


def documented_form(form: type[BaseModel]) -> dict[str, Any]:
    """Returns the `openapi_extra` for a route whose body is a multipart form with an uploaded file. form: its
    fields."""
    content = {"multipart/form-data": {"schema": _reference(form)}}
    return {"requestBody": {"required": True, "content": content}}


def complete(document: dict[str, Any], apis: ApiTable, *, wants_key: bool, model: str) -> None:
    """Completes FastAPI's document, and removes its 422 answers. wants_key: requests without a key are refused. model:
    the served model's name."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    _add_schemas(schemas, apis)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    components["securitySchemes"] = _KEYS
    keys: list[dict[str, list[str]]] = [{name: []} for name in _KEYS]
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            _name_model(operation, model)
            if path in apis.open_paths:
                operation["security"] = []
                continue
            operation["security"] = keys if wants_key else [{}, *keys]
            error = {"application/json": {"schema": _reference(apis.error_model(path))}}
            operation["responses"]["4XX"] = {"description": _CLIENT_ERROR, "content": error}
            operation["responses"]["5XX"] = {
                "description": _SERVER_ERROR,
                "headers": {"Retry-After": _RETRY_AFTER},
                "content": error,
            }


def _name_model(operation: dict[str, Any], model: str) -> None:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if "model" in content.get("example", {}):
        content["example"] = content["example"] | {"model": model}


def _add_schemas(schemas: dict[str, Any], apis: ApiTable) -> None:
    bodies = [body for api in apis.apis for body in api.bodies]
    _, made = models_json_schema([(model, "validation") for model in bodies], ref_template=_SCHEMA_PATH)
    schemas.update(made["$defs"])
    objects = _unique(kind for api in apis.apis for kind in (*api.streamed, api.error_model))
    mode: Literal["serialization"] = "serialization"
    adapters = [(kind.__name__, mode, TypeAdapter(kind)) for kind in objects]
    _, more = TypeAdapter.json_schemas(adapters, ref_template=_SCHEMA_PATH)
    for name, schema in more["$defs"].items():
        schemas.setdefault(name, schema)


def _unique(kinds: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(kinds))


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _SCHEMA_PATH.format(model=kind.__name__)}
