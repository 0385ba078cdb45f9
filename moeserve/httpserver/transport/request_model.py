"""What every request model shares: strictness, and the ways to refuse or to document a field."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

MAX_FIELDS: Final = 256  # of an object; the largest of ours has 60
MAX_DEPTH: Final = 32  # of free-form JSON inside a request
MAX_VALUES: Final = 100_000  # in it
MAX_SCHEMA_DEPTH: Final = 96
INT64_MAX: Final = (1 << 63) - 1
INT32_MAX: Final = (1 << 31) - 1


def _give_up_early(schema: Any) -> None:
    """Sets pydantic-core's `fail_fast` wherever it knows it."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _give_up_early(part)
    elif isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _give_up_early(part)


class RequestModel(BaseModel):
    """Strict: no field that is unknown, no "3" for 3, no NaN. A null means that the field was left out.

    A list or an object is given up at its first wrong member. Pydantic would describe each: the million that fit into
    4 MB took 25 s and 2 GB, and all streams waited.
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
    """Marks the field in /openapi.json, as the nearest that it has a word for."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(schema) | {"deprecated": True}


def unsupported(what: str, *neutral: Any) -> AfterValidator:
    """Refuses by name a field that would change the answer but is not supported, unless its value is one of
    `neutral`, which ask for nothing. Written `Annotated[Any, unsupported(...)]`."""
    accepted = f" (only {' or '.join(repr(one) for one in neutral)} is accepted)" if neutral else ""

    def refuse(value: Any) -> Any:
        if any(value == one and type(value) is type(one) for one in neutral):
            return value
        raise PydanticCustomError("unsupported", "{text}", {"text": f"{what} is not supported{accepted}"})

    return _Unsupported(refuse)


NO_EFFECT: Final[Any] = Field(description="Accepted for OpenAI's clients; has no effect.")


def check_depth(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Free-form JSON goes to other code (templates); it is bounded here so that nothing recurses far, nor for long."""
    _count_values(value, depth, MAX_VALUES)
    return value


def _count_values(value: Any, depth: int, most: int) -> int:
    """How many of `most` are left."""
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
    """JSON Schema takes two levels to describe one."""
    return check_depth(schema, MAX_SCHEMA_DEPTH)


FreeDict = Annotated[dict[str, Any], AfterValidator(check_depth), Field(max_length=128)]


JsonSchemaDict = Annotated[dict[str, Any], AfterValidator(check_schema_depth), Field(max_length=4096)]


def one_or_many(value: Any) -> Any:
    """For fields that take a string or a list."""
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=1024)]
StopStrings = Annotated[
    list[StopString],
    BeforeValidator(one_or_many, json_schema_input_type=str | list[str]),
    Field(max_length=16, description="At most 16 strings that end the text; not part of it."),
]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
ModelName = Annotated[str, Field(max_length=512, description="The served name; the default when left out.")]
CacheSalt = Annotated[
    str, Field(max_length=256, description="Only requests with the same salt share cached prefixes.")
]
Label = Annotated[str, Field(max_length=1024)]
