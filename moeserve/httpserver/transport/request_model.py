"""RequestModel, the base of every request body: strict, bounded, and explicit about unsupported fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Final, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreConfig, CoreSchema, PydanticCustomError, SchemaValidator

from moeserve.httpserver.transport.unknown_fields import drop_unknown

MAX_FIELDS: Final = 256  # fields of one object; the largest model has 60
MAX_DEPTH: Final = 32  # nesting of free-form JSON inside a request
MAX_VALUES: Final = 100_000  # in free-form JSON
EXACT_FLOATS: Final = 1 << 53  # a larger float may stand for a number that was rounded
MAX_SCHEMA_DEPTH: Final = 96

# Fields that clients put into any object of a request, mostly copies from an earlier answer: cache markers, which have
# no effect on this server, and a client's own parse of an answer.
IDLE_ANYWHERE: Final = frozenset(
    {
        *("annotations", "cache_control", "prompt_cache_breakpoint", "provider_specific_fields"),
        *("parsed", "parsed_arguments", "reasoning_details", "thinking_blocks"),
    }
)


# Values that mean "not set". Forms, and clients in languages without null, send them.
EMPTY: Final[tuple[Any, ...]] = ([], {}, "")


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field of another server that would change the answer and is not supported here. Values in `neutral` are
    accepted, and so are empty values unless `empty_asks`. instead: what to use here."""

    neutral: tuple[Any, ...] = ()
    instead: str = ""
    details: Mapping[str, Any] | None = None  # machine-readable, for the error
    empty_asks: bool = False

    def takes(self, value: Any) -> bool:
        return asks_nothing(value, self.neutral if self.empty_asks else (*self.neutral, *EMPTY))

    def refusal(self, given: str) -> str:
        """Returns the message for a refused value. given: the value as text."""
        use = f"; use {self.instead}" if self.instead else ""
        return f"is not supported{_only(self.neutral)}{given}{use}"


def asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Returns whether the value equals one of `neutral`. 1.0 equals 1, but true does not."""
    return any(value == one and (type(value) is bool) == (type(one) is bool) for one in neutral)


def _only(neutral: tuple[Any, ...]) -> str:
    return f" (only {' or '.join(repr(one) for one in neutral)} is accepted)" if neutral else ""


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
    """A strict model: it refuses "3" for 3, and NaN. A null counts as a field that was left out. Undeclared fields are
    dropped or refused (`unknown_fields`), with two exceptions: fields in `unsupported_fields` are refused unless their
    value is neutral, and fields in `idle` are accepted and have no effect. A declared field that is in `empty` counts
    as left out if its value is empty. A field marked `Advisory` counts as unknown if its value is invalid.

    Validation of a list or an object ends at its first wrong member. By default pydantic describes every wrong member:
    the million that fit into 4 MB took 25 s and 2 GB, and all streams waited.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        protected_namespaces=(),
        # Models are built at their first body: building all of them takes a tenth of the process's start.
        defer_build=True,
        json_schema_extra=lambda schema: schema.pop("additionalProperties", None),
    )
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {}
    idle: ClassVar[frozenset[str]] = frozenset()
    empty: ClassVar[frozenset[str]] = frozenset()
    takes_whole_floats: ClassVar[bool] = False  # 3.0 for 3, as vLLM, Ollama and llama-server take it

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_asked(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            message = "has {found} fields; at most {most} are taken"
            raise PydanticCustomError("too_many_fields", message, {"found": len(data), "most": MAX_FIELDS})
        asked = {
            name: value
            for name, value in data.items()
            if value is not None and not (name in cls.empty and value in EMPTY)
        }
        for name in asked.keys() & _integers(cls) if cls.takes_whole_floats else ():
            number = asked[name]
            if type(number) is float and number.is_integer() and abs(number) <= EXACT_FLOATS:
                asked[name] = int(number)
        unread = [
            name
            for name in asked.keys() & advisory(cls).keys()
            if not _reads(advisory(cls)[name], asked[name])
        ]
        if unread and drop_unknown(info, cls, unread, are_known=True):
            for name in unread:
                del asked[name]
        if not (others := asked.keys() - declared(cls)):
            return asked
        unknown = []
        for name in others:
            there = cls.unsupported_fields.get(name)
            if name in cls.idle or name in IDLE_ANYWHERE or (there is not None and there.takes(asked[name])):
                del asked[name]
            elif there is None:
                unknown.append(name)
        if unknown and drop_unknown(info, cls, unknown):
            for name in unknown:
                del asked[name]
        return asked

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _give_up_early(schema)
        return schema


@cache
def declared(model: type[BaseModel]) -> frozenset[str]:
    """Returns the names of the model's fields in a body."""
    return frozenset(info.alias or name for name, info in model.model_fields.items())


@cache
def _integers(model: type[BaseModel]) -> frozenset[str]:
    """Returns the names of the model's fields that are integers, or null."""
    return frozenset(
        info.alias or name
        for name, info in model.model_fields.items()
        if info.annotation is int or set(get_args(info.annotation)) == {int, type(None)}
    )


class Advisory:
    """Marks a field without effect. An invalid value is treated as an unknown field (`unknown_fields`): dropped,
    counted and logged, or refused."""

    def __init__(self, description: str) -> None:
        """description: the field's description in /openapi.json."""
        self.description = description

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(schema) | {"description": self.description}


@cache
def advisory(model: type[BaseModel]) -> Mapping[str, SchemaValidator]:
    """Returns the validators of the model's fields without effect, by the fields' names in a body."""
    marked = {
        info.alias or name: info
        for name, info in model.model_fields.items()
        if any(isinstance(one, Advisory) for one in info.metadata)
    }
    return {name: _reader(info) for name, info in marked.items()}


def _reader(info: FieldInfo) -> SchemaValidator:
    kind: Any = Annotated[info.annotation, *info.metadata]
    schema = TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False)).core_schema
    _give_up_early(schema)
    return SchemaValidator(schema, CoreConfig(strict=True, allow_inf_nan=False))


def _reads(reader: SchemaValidator, value: Any) -> bool:
    try:
        reader.validate_python(value)
    except ValidationError:
        return False
    return True


class Unsupported(AfterValidator):
    """Marks a field that is always refused. /openapi.json has it as deprecated, the closest that OpenAPI offers."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(schema) | {"deprecated": True}


def unsupported(what: str, *neutral: Any) -> AfterValidator:
    """Returns a validator for a field that would change the answer but is not supported: it accepts only values in
    `neutral`, and raises PydanticCustomError for others, so that the request is refused. Use it as `Annotated[Any,
    unsupported(...)]`."""
    text = f"{what} is not supported{_only(neutral)}"

    def refuse(value: Any) -> Any:
        if asks_nothing(value, neutral):
            return value
        raise PydanticCustomError("unsupported", "{text}", {"text": text})

    return Unsupported(refuse)


NO_EFFECT: Final = Advisory("Accepted for OpenAI's clients; has no effect.")


def check_depth(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Returns the value if its nesting and its number of values are within the bounds for free-form JSON, because other
    code (templates) walks through it. Raises PydanticCustomError if it has more than is allowed."""
    _count_values(value, depth, MAX_VALUES)
    return value


def _count_values(value: Any, depth: int, most: int) -> int:
    """Returns `most` minus the number of values in free-form JSON."""
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
    """Does what `check_depth` does, with twice the depth: JSON Schema takes two levels to describe one."""
    return check_depth(schema, MAX_SCHEMA_DEPTH)


FreeDict = Annotated[dict[str, Any], AfterValidator(check_depth), Field(max_length=128)]
JsonSchemaDict = Annotated[dict[str, Any], AfterValidator(check_schema_depth), Field(max_length=4096)]
Label = Annotated[str, Field(max_length=1024)]
