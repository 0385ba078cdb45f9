"""Reads a JSON request body into its model.

FastAPI's body parameters are not used: orjson is faster than json and refuses NaN and infinities, and the errors have
moeserve's form. A body is read as JSON whatever its Content-Type says, because many clients send no
Content-Type, or a form's (curl's default). `origins.py` decides which web pages of other sites may send bodies.
"""

from __future__ import annotations

import codecs
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import orjson
from fastapi import Request
from pydantic import ValidationError

from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.lone_surrogates import mend
from moeserve.httpserver.transport.request_model import RequestModel
from moeserve.httpserver.transport.unknown_fields import Dropped, UnknownFields
from moeserve.httpserver.transport.validation import from_validation

NO_MEMORY: Final = "Not enough memory"  # orjson's error message if an allocation fails

M = TypeVar("M", bound=RequestModel)


async def read_body(request: Request, model: type[M]) -> M:
    """Parses the request's body. Raises ApiError 400. (413 comes from the middleware that bounds bodies.)"""
    data = await _read(await request.body())
    unknown: UnknownFields = request.app.state.unknown_fields
    with _no_collections(), unknown.dropped_from(model, request.scope) as dropped:
        return _validated(data, model, dropped)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Suspends the garbage collector, which would scan a large body again and again while it is parsed: for a million
    empty lists that is 80% of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _read(raw: bytes) -> Any:
    """Returns the body's values. Raises ApiError 400."""
    try:
        return await _json(raw.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        if NO_MEMORY in str(error):
            raise MemoryError from error
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _validated(data: Any, model: type[M], dropped: Dropped | None) -> M:
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(data, context=dropped)
    except ValidationError as error:
        raise from_validation(model, error.errors(include_url=False)) from error


async def _json(raw: bytes) -> Any:
    """Parses JSON, with U+FFFD for half a surrogate pair. Raises JSONDecodeError."""
    try:
        with _no_collections():
            return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if "surrogate in string" not in str(error):
            raise
        text = error.doc
    text = await mend(text)
    with _no_collections():
        return orjson.loads(text)
