"""Reading a JSON request body into its model.

By hand rather than as a FastAPI parameter: orjson is faster than json and refuses NaN, infinities and lone
surrogates, and errors are ours. The content type must say JSON: a web page may then post here from another
origin only after asking first, which nobody answers, so it cannot use the server of somebody who visits it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from moeserve.httpserver.transport.errors import ApiError, from_validation

M = TypeVar("M", bound=BaseModel)

_SCHEMA_PATH: Final = "#/components/schemas/{model}"


async def read_body(request: Request, model: type[M]) -> M:
    """Raises ApiError 400 or 415; 413 comes from the middleware that bounds every body."""
    raw = await request.body()
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        shown = content_type or "nothing"
        raise ApiError(
            415, f"the content-type header must be application/json, got {shown}", code="content_type"
        )
    with _no_collections():
        return _parsed(raw, model)


@contextmanager
def _no_collections() -> Iterator[None]:
    """The garbage collector looks again and again at all that a large body is becoming: four fifths of the time that
    a million empty lists take."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _parsed(raw: bytes, model: type[M]) -> M:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(model, error.errors(include_url=False)) from error


def documented(model: type[BaseModel]) -> dict[str, Any]:
    """For a route's `openapi_extra`."""
    schema = {"$ref": _SCHEMA_PATH.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_schemas(openapi: dict[str, Any], models: tuple[type[BaseModel], ...]) -> None:
    """Puts what `documented` refers to into an OpenAPI document."""
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_SCHEMA_PATH)
    openapi.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
