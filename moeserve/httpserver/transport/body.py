"""Reads a JSON request body into its model.

FastAPI's body parameters are not used: orjson is faster than json and refuses NaN, infinities and lone surrogates, and
errors have our form. The content type must be JSON. A page of another origin may then post here only after a CORS
preflight, which is answered for the origins of --allowed-origin alone, so no other can use the server of somebody who
visits it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import orjson
from fastapi import Request
from pydantic import ValidationError

from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.request_model import RequestModel
from moeserve.httpserver.transport.unknown_fields import UnknownFields
from moeserve.httpserver.transport.validation import from_validation

NO_MEMORY: Final = "Not enough memory"  # orjson's words where an allocation failed

M = TypeVar("M", bound=RequestModel)


async def read_body(request: Request, model: type[M]) -> M:
    """Raises ApiError 400 or 415; 413 comes from the middleware that bounds every body."""
    raw = await request.body()
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        shown = content_type or "nothing"
        raise ApiError(
            415, f"the content-type header must be application/json, got {shown}", code="content_type"
        )
    unknown: UnknownFields = request.app.state.unknown_fields
    with _no_collections(), unknown.dropped_from(model, request.scope):
        return _parsed(raw, model)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Suspends the garbage collector, which would scan a large body again and again while it is parsed: 80% of the
    time that a million empty lists take."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _parsed(raw: bytes, model: type[M]) -> M:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if NO_MEMORY in str(error):
            raise MemoryError from error
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(model, error.errors(include_url=False)) from error
