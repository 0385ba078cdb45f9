"""RequestModel, the base of every request body: strict, bounded, and explicit about fields without support."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

MAX_FIELDS: Final = 256  # of an object; our largest has 60
MAX_DEPTH: Final = 32  # of free-form JSON inside a request
MAX_VALUES: Final = 100_000  # in free-form JSON
MAX_SCHEMA_DEPTH: Final = 96


def _give_up_early(schema: Any) -> None:
    """Sets pydantic-core's `fail_fast` on every list and dict of the schema."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _give_up_early(part)
    elif isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _give_up_early(part)


class RequestModel(BaseModel):
    """A strict model: refuses unknown fields, "3" for 3, and NaN. A null counts as a field that was left out.

    Validation of a list or an object ends at its first wrong member. Pydantic would describe every one: the million
    that fit into 4 MB took 25 s and 2 GB, and all streams waited.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _nulls_are_left_out(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            message = "has {found} fields; at most {most} are taken"
            raise PydanticCustomError("too_many_fields", message, {"found": len(data), "most": MAX_FIELDS})
        return {name: value for name, value in data.items() if value is not None}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _give_up_early(schema)
        return schema


class _Unsupported(AfterValidator):
    """Marks the field as deprecated in /openapi.json, the closest that OpenAPI has."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(schema) | {"deprecated": True}


def unsupported(what: str, *neutral: Any) -> AfterValidator:
    """Returns a validator that refuses a field which would change the answer but is not supported. The values in
    `neutral` ask for nothing and pass. Written `Annotated[Any, unsupported(...)]`."""
    accepted = f" (only {' or '.join(repr(one) for one in neutral)} is accepted)" if neutral else ""

    def refuse(value: Any) -> Any:
        if any(value == one and type(value) is type(one) for one in neutral):
            return value
        raise PydanticCustomError("unsupported", "{text}", {"text": f"{what} is not supported{accepted}"})

    return _Unsupported(refuse)


NO_EFFECT: Final[Any] = Field(description="Accepted for OpenAI's clients; has no effect.")


def check_depth(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Bounds free-form JSON, which other code (templates) walks through. Raises PydanticCustomError."""
    _count_values(value, depth, MAX_VALUES)
    return value


def _count_values(value: Any, depth: int, most: int) -> int:
    """Counts the values of free-form JSON and returns how many of `most` are left."""
    if depth == 0:
        raise PydanticCustomError("too_deep", "is nested too deep")
    if most < 0:
        message = "holds more than {most} values"
        raise PydanticCustomError("too_many_values", message, {"most": MAX_VALUES})
    most -= 1
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            most = _count_values(inner, depth - 1, most)
    return most


def check_schema_depth(schema: Any) -> Any:
    """Like `check_depth`, for JSON Schema, which needs two levels to describe one."""
    return check_depth(schema, MAX_SCHEMA_DEPTH)


FreeDict = Annotated[dict[str, Any], AfterValidator(check_depth), Field(max_length=128)]
JsonSchemaDict = Annotated[dict[str, Any], AfterValidator(check_schema_depth), Field(max_length=4096)]
Label = Annotated[str, Field(max_length=1024)]
