"""Converts an argument's plain text to JSON, with the type from the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from .json_reader import as_json
from .json_text import escaped, to_json

_WORDS: Final[Mapping[str, Any]] = {"True": True, "False": False, "None": None}
_WORDS_IN_ANY_CASE: Final[Mapping[str, Any]] = {"true": True, "false": False, "none": None, "null": None}
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
# Types as tools' authors spell them, after Python, C and OpenAPI.
_OTHER_TYPES: Final[Mapping[str, str]] = {
    **{name: name for name in _ANY},
    **dict.fromkeys(("int", "long", "uint"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "tuple"), "array"),
    "bool": "boolean",
    "none": "null",
}
_IMPLIED_TYPES: Final[Mapping[str, str]] = {"properties": "object", "items": "array"}  # by keyword

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
    found = property_schema(schema, key, schema)
    return types_of(found, schema) or frozenset(
        kind for word, kind in _IMPLIED_TYPES.items() if isinstance(found.get(word), Mapping)
    )


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the JSON types that a property's schema allows; empty if it names none. root: the schema in which
    references are resolved."""
    types: set[str] = set()
    for one in _options(schema, root):
        named = one.get("type")
        written = named if isinstance(named, list) else [named]
        types |= {_OTHER_TYPES.get(name.lower(), name) for name in written if isinstance(name, str)}
        listed = one.get("enum")
        values: list[Any] = [*listed] if isinstance(listed, list) else []
        if "const" in one:
            values.append(one["const"])
        types |= {_JSON_TYPES.get(type(value), ("string",))[0] for value in values}
        if one.get("nullable") is True and types:
            types.add("null")
    return frozenset(types)


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


def _options(schema: Any, root: Schema) -> Iterator[Schema]:
    """Yields the schema, the schemas that it refers to, and its alternatives. Each is visited once: schemas may refer
    to themselves, and in many ways to the same one."""
    visited: set[int] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping) or id(one) in visited:
            continue
        visited.add(id(one))
        yield one
        found = [referred(one["$ref"], root)] if "$ref" in one else []
        for word in ("anyOf", "oneOf", "allOf"):
            found += one[word] if isinstance(one.get(word), list) else []
        waiting += reversed(found)


def value_of_text(text: str, types: frozenset[str]) -> Any:
    """Returns an element's text as a value of one of the JSON Schema types; text that fits none stays a string. Without
    types, numbers, true and false are converted, and any other text is a string."""
    if types:
        return json.loads(_typed(text, types)) if not types <= {"string"} else text
    return json.loads(_typed(text, frozenset({"number", "integer", "boolean"})))


def _typed(text: str, types: frozenset[str]) -> str:
    """Returns the text's value as JSON, of one of the types; a string if it fits no type."""
    word = _without_fence(text.strip())
    try:
        value = _word(word, types) if word.lower() in _WORDS_IN_ANY_CASE else _loaded(word)
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


def _word(word: str, types: frozenset[str]) -> Any:
    """Returns the value of true, false, null or None. Where the text may be a string, other cases than JSON's and
    Python's are strings."""
    if "string" not in types:
        return _WORDS_IN_ANY_CASE[word.lower()]
    return _WORDS[word] if word in _WORDS else _loaded(word)


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
