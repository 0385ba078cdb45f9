"""Field types for the grammars that several APIs take."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import orjson
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from moeserve.httpserver.transport.request_model import check_schema_depth

MAX_PATTERN_CHARS: Final = 1 << 16
STRICT: Final = Field(description="True: a schema that cannot be enforced as a whole is refused.")


def _schema_text(value: Any) -> str:
    """Returns the JSON text of a schema that the client sent as an object or as JSON text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise PydanticCustomError(
                "schema", "is not valid JSON: {error}", {"error": str(error)}
            ) from error
    if not isinstance(value, dict | bool):
        raise PydanticCustomError("schema", "must be a JSON Schema: an object")
    return json.dumps(check_schema_depth(value))


Schema = Annotated[
    Any,
    AfterValidator(_schema_text),
    Field(description="JSON Schema that the answer must satisfy: an object, or its text."),
]
Pattern = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_PATTERN_CHARS,
        description="Regular expression that the whole answer must match.",
    ),
]
Grammar = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_PATTERN_CHARS,
        description="Grammar that the answer must follow, in llguidance's dialect of Lark or in GBNF.",
    ),
]
