"""Converts an argument's plain text to JSON, with the type from the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from .json_reader import as_json
from .json_text import escaped, to_json

_WORDS: Final[Mapping[str, Any]] = {"True": True, "False": False, "None": None}
_JSON_TYPES: Final[Mapping[type, tuple[str, ...]]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}
_STRING: Final = frozenset({"string"})
_FENCED: Final = re.compile(r"```(?:json)?\n(.*)\n```", re.DOTALL)
_ANY: Final = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MAX_REFERENCES: Final = 8  # the most consecutive `$ref`s that are followed

Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]  # the schemas of the tools' arguments, by tool name


class ValueReader:
    """Reads one argument's text. A string is yielded as it comes, any other value when it is complete."""

    def __init__(self, types: frozenset[str], trims_line_end: bool, is_string: bool | None = None) -> None:
        """types: JSON types that the schema allows; empty: unknown. trims_line_end: the line end before the value
        belongs to the format. is_string: whether the format marks the value as text (True) or JSON (False); None: it
        does not say."""
        if is_string and (not types or "string" in types):
            types = _STRING
        self._is_json = is_string is False
        self._types = types or (_ANY if self._is_json else types)
        self._is_string = types <= _STRING and not self._is_json  # also if the schema names no type
        self._trims = trims_line_end
        self._text: list[str] = []

    def begin(self) -> str:
        return '"' if self._is_string else ""

    def push(self, text: str) -> str:
        """Returns the JSON that is now certain."""
        if text and self._trims:
            self._trims = False
            text = text.removeprefix("\r\n" if text.startswith("\r") else "\n")
        if self._is_string:
            return escaped(text)
        self._text.append(text)
        return ""

    def end(self) -> str:
        if self._is_string:
            return '"'
        text = "".join(self._text)
        if self._is_json and "string" in self._types and (string := _json_string(text)) is not None:
            return string
        return _typed(text, self._types)


def argument_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Returns the JSON types that a tool's schema allows for an argument; empty if it names none."""
    properties = schema.get("properties")
    return types_of(properties.get(key), schema) if isinstance(properties, dict) else frozenset()


def types_of(schema: Any, root: Mapping[str, Any], references: int = 0) -> frozenset[str]:
    """Returns the JSON types that a property's schema allows; empty if it names none. root: the schema in which
    references are resolved."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    if references < _MAX_REFERENCES and "$ref" in schema:
        types |= types_of(referred(schema["$ref"], root), root, references + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        if isinstance(options, list):
            for option in options:
                types |= types_of(option, root, references)
    listed = schema.get("enum")
    values: list[Any] = [*listed] if isinstance(listed, list) else []
    if "const" in schema:
        values.append(schema["const"])
    for value in values:
        types.add(_JSON_TYPES.get(type(value), ("string",))[0])
    return frozenset(one for one in types if isinstance(one, str))


def referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Resolves a reference such as `#/$defs/name` within the schema. Returns None for a reference of any other form."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for name in reference[2:].split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def property_schema(schema: Any, key: str, root: Schema) -> Schema:
    """Returns the schema of an object's property; an empty one if there is none."""
    for option in _options(schema, root):
        properties = option.get("properties")
        if isinstance(properties, Mapping) and isinstance(properties.get(key), Mapping):
            return properties[key]  # type: ignore[no-any-return]  # checked above
        if isinstance(option.get("additionalProperties"), Mapping):
            return option["additionalProperties"]  # type: ignore[no-any-return]  # checked above
    return {}


def item_schema(schema: Any, root: Schema) -> Schema:
    """Returns the schema of an array's items; an empty one if there is none."""
    return next((one["items"] for one in _options(schema, root) if isinstance(one.get("items"), Mapping)), {})


def _options(schema: Any, root: Schema, references: int = 0) -> Iterator[Schema]:
    """Yields the schema, the schemas that it refers to, and its alternatives."""
    if not isinstance(schema, Mapping) or references > _MAX_REFERENCES:
        return
    yield schema
    if "$ref" in schema:
        yield from _options(referred(schema["$ref"], root), root, references + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        for option in schema[word] if isinstance(schema.get(word), list) else ():
            yield from _options(option, root, references + 1)


def value_of_text(text: str, types: frozenset[str]) -> Any:
    """Converts an element's text to a value of one of the types. Without types, numbers, true and false are converted,
    and any other text is a string."""
    if types:
        return json.loads(_typed(text, types)) if not types <= {"string"} else text
    return json.loads(_typed(text, frozenset({"number", "integer", "boolean"})))


def _typed(text: str, types: frozenset[str]) -> str:
    """Returns the text's value as JSON, of one of the types; a string if it fits no type."""
    word = _without_fence(text.strip())
    try:
        value = _WORDS[word] if word in _WORDS else _loaded(word)
        if isinstance(value, str) and not types & _STRING and value != text:
            inner = _typed(value, types)  # the value in quotes
            return to_json(text) if inner.startswith('"') else inner
        if "integer" in types and "number" not in types and isinstance(value, float) and value.is_integer():
            value = int(value)  # 5.0
        if types & set(_JSON_TYPES.get(type(value), ())):
            return to_json(value)
    except (ValueError, RecursionError):  # invalid JSON, NaN, or too long for Python
        pass
    return to_json(text)


def _json_string(text: str) -> str | None:
    """Returns the text if it is a JSON string, in valid Unicode; else None."""
    try:
        value = json.loads(text) if text.lstrip().startswith('"') else None
    except ValueError:
        return None
    return to_json(value) if isinstance(value, str) else None


def _without_fence(text: str) -> str:
    """Returns the content of a Markdown code block; any other text unchanged."""
    match = _FENCED.fullmatch(text)
    return text if match is None else match[1]


def _loaded(text: str) -> Any:
    """Parses JSON, or a value in Python's syntax. Raises ValueError."""
    try:
        return json.loads(text)
    except ValueError:
        written = as_json(f"[{text}]")
        if written is not None and len(values := json.loads(written)) == 1:
            return values[0]
        written = as_json(text)
        if written is None:
            raise
        return json.loads(written)
