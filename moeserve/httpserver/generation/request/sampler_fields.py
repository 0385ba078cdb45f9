"""The sampler fields that are not numbers: the samplers' order, and DRY's sequence breakers."""

from __future__ import annotations

from typing import Annotated, Any, Final

import orjson
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from moeserve.httpserver.transport.request_model import RequestModel
from moeserve.sampling.order import read_order

MAX_SAMPLERS: Final = 32  # that a request names
SAMPLER_LISTS: Final = frozenset(
    {"samplers", "dry_sequence_breakers"}
)  # fields whose empty list means "not set"
DRY_BREAKERS: Final = ("\n", ":", '"', "*")  # llama.cpp's


def _order(value: Any) -> tuple[str, ...]:
    names = list(value) if isinstance(value, list | tuple) else value
    if not isinstance(names, str) and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise PydanticCustomError("samplers", "must be a list of samplers' names, or a text of their letters")
    if len(names) > MAX_SAMPLERS:
        raise PydanticCustomError("samplers", "names too many samplers")
    try:
        return read_order(names)
    except ValueError as error:
        raise PydanticCustomError("samplers", "{error}", {"error": str(error)}) from error


def _breakers(value: Any) -> Any:
    """Returns a list of breakers, also from a JSON list in a string, as clients of text-generation-webui send it."""
    try:
        return orjson.loads(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError:
        return value


class SamplerFields(RequestModel):
    samplers: Annotated[
        tuple[str, ...],
        BeforeValidator(_order, json_schema_input_type=list[str] | str),
        Field(
            description="The samplers that run, in this order, by llama-server's names or letters. Without the field "
            "they run as the page on generation says."
        ),
    ] = ()
    dry_sequence_breakers: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=40)]],
        BeforeValidator(_breakers, json_schema_input_type=list[str] | str),
        Field(
            max_length=16,
            default_factory=lambda: list(DRY_BREAKERS),
            description='Texts over which DRY counts no repetition. Default: a line end, ":", \'"\' and "*".',
        ),
    ]
