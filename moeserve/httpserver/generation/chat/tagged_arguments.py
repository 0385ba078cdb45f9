"""Turns a tool's JSON Schema into a grammar of arguments in tags. `chatformat.values` reads the arguments' texts back:
as JSON for numbers, objects and the like, as plain text for strings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from moeserve.chatformat.values import ValueReader, referred, types_of
from moeserve.grammar.json_schema.keywords import ENFORCED, FORMATS, REFUSED
from moeserve.grammar.spec import ANY_OBJECT, GrammarTool, TaggedArgument

_OBJECT: Final = frozenset({"type", "properties", "required", "additionalProperties"})
_DEFINITIONS: Final = ("$defs", "definitions")
_KEY: Final = re.compile(r"[\w.:-]{1,64}")
_MAX_CHARS: Final = (
    2000  # the largest maxLength that is enforced: the automaton needs a state for each character
)
# The most characters of schemas that are walked through or written: each argument's schema is written with the tool's
# definitions, and may refer to any of them.
_MAX_WRITTEN: Final = 1 << 22
_MAX_DEPTH: Final = 8  # `anyOf`s within each other whose values are listed: schemas may refer to themselves
_MAX_OPTIONS: Final = 1000  # the most values of one argument that are listed


def with_tagged_arguments(
    tools: Sequence[GrammarTool], tags_say_type: bool = False
) -> list[GrammarTool] | None:
    """Returns the tools with their `arguments`; None if a tool's schema cannot be enforced on arguments in tags.
    tags_say_type: an argument's tag says whether its value is a string or JSON."""
    found = []
    written = 0
    for tool in tools:
        if tool.schema == ANY_OBJECT.schema:
            found.append(tool)
            continue
        schema = json.loads(tool.schema)
        written += len(tool.schema) * _num_copies(schema)
        if written > _MAX_WRITTEN:
            return None
        arguments = tagged_arguments(schema, tags_say_type)
        if arguments is None:
            return None
        found.append(replace(tool, arguments=arguments))
    return found


def _num_copies(schema: Mapping[str, Any]) -> int:
    """Returns how often the schema's text is written at most."""
    properties = schema.get("properties")
    has_definitions = any(isinstance(schema.get(name), dict) for name in _DEFINITIONS)
    return len(properties) if has_definitions and isinstance(properties, dict) and properties else 1


def tagged_arguments(schema: Mapping[str, Any], tags_say_type: bool = False) -> list[TaggedArgument] | None:
    """Returns the schema's named arguments in the schema's order; None for a schema that can be enforced in JSON
    only."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if _words(schema) - _OBJECT or not isinstance(required, list):
        return None
    if not all(isinstance(key, str) for key in required):
        return None
    if properties is None and schema.get("additionalProperties") is False:
        properties = {}
    if not isinstance(properties, dict) or not all(key in properties for key in required):
        return None
    found = []
    must = frozenset(required)
    for key, one in properties.items():
        argument = _argument(key, key in must, _resolved(one, schema), schema, tags_say_type)
        if argument is None or not _KEY.fullmatch(key):
            return None
        found.append(argument)
    return found


def _words(schema: Mapping[str, Any]) -> set[str]:
    """Returns the schema's keywords without annotations."""
    words = {word for word in schema if word in ENFORCED or word in REFUSED}
    format = schema.get("format")
    return words - {"format"} if isinstance(format, str) and format not in FORMATS else words


def _argument(
    key: str, is_required: bool, one: Any, root: Mapping[str, Any], tags_say_type: bool
) -> TaggedArgument | None:
    if not isinstance(one, dict):
        return TaggedArgument(key, is_required) if one is True else None
    types = types_of(one, root)
    if types and "string" not in types:
        defs = {name: root[name] for name in _DEFINITIONS if name in root}
        kept = _words(one)
        bare = {word: value for word, value in one.items() if word in kept}  # equal ones share a rule
        whole = bare | defs
        return (
            None if _refers_elsewhere(whole) else TaggedArgument(key, is_required, schema=json.dumps(whole))
        )
    options = _options(one, root)
    if options and tags_say_type:
        return _listed(key, is_required, options)
    if options is not None:
        words = [option if isinstance(option, str) else json.dumps(option) for option in options]
        read = all(_reads_back(word, option, types) for word, option in zip(words, options, strict=True))
        return TaggedArgument(key, is_required, words=words) if words and read else None
    if _is_any_of_types(one):
        others = {"type": sorted(types - {"string"})} if types else {}
        has_others = tags_say_type and types != {"string"}
        return TaggedArgument(key, is_required, other_schema=json.dumps(others) if has_others else None)
    least, most = one.get("minLength", 0), one.get("maxLength")
    if one.get("type") != "string" or _words(one) - {"type", "minLength", "maxLength"}:
        return None
    if any(
        isinstance(n, bool) or not isinstance(n, int | None) or (n or 0) > _MAX_CHARS for n in (least, most)
    ):
        return None
    return TaggedArgument(key, is_required, min_chars=least, max_chars=most)


def _listed(key: str, is_required: bool, options: Sequence[Any]) -> TaggedArgument:
    """Returns an argument with the values that its schema lists. Some are strings, so the argument's tag says whether a
    value is a string."""
    words = [option for option in options if isinstance(option, str)]
    others = [option for option in options if not isinstance(option, str)]
    other_schema = json.dumps({"enum": others}) if others else None
    return TaggedArgument(key, is_required, words=words, other_schema=other_schema)


def _refers_elsewhere(schema: Any) -> bool:
    """Returns whether a `$ref` in an argument's schema points to anything but the tool's definitions."""
    if isinstance(schema, list):
        return any(map(_refers_elsewhere, schema))
    if not isinstance(schema, dict):
        return False
    target = schema.get("$ref")
    if isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")):
        return True
    return any(map(_refers_elsewhere, schema.values()))


def _resolved(one: Any, root: Mapping[str, Any]) -> Any:
    """Follows a schema that consists of a `$ref` only."""
    if isinstance(one, dict) and "$ref" in one and _words(one) == {"$ref"}:
        return referred(one["$ref"], root)
    return one


def _options(one: Any, root: Mapping[str, Any], depth: int = 0) -> list[Any] | None:
    """Returns the values that a schema lists; None if it allows other values. depth: of the `anyOf`s around it."""
    one = _resolved(one, root)
    if not isinstance(one, dict) or depth > _MAX_DEPTH:
        return None
    words = _words(one)
    if words <= {"enum", "type"} and isinstance(one.get("enum"), list):
        return list(one["enum"])
    if words <= {"const", "type"} and "const" in one:
        return [one["const"]]
    if words == {"type"} and one["type"] == "null":
        return [None]
    if words == {"anyOf"} and isinstance(one["anyOf"], list):
        listed: list[Any] = []
        for part in one["anyOf"]:
            options = _options(part, root, depth + 1)
            if not options:  # none may follow: a schema of empty lists would be walked through for ever
                return None
            listed += options
            if len(listed) > _MAX_OPTIONS:
                return None
        return listed
    return None


def _reads_back(word: str, option: Any, types: frozenset[str]) -> bool:
    """Returns whether the option is read back unchanged if it is written in tags. A text that has tags, or begins or
    ends with a line end, is changed."""
    if "<" in word or word != word.strip():
        return False
    reader = ValueReader(types, trims_line_end=False)
    value = json.loads(reader.begin() + reader.push(word) + reader.end())
    return type(value) is type(option) and value == option


def _is_any_of_types(one: Mapping[str, Any]) -> bool:
    """Returns whether every text is a valid value: the schema lists types only, string among them, or has no
    keywords."""
    words = _words(one)
    if not words:
        return True
    if words == {"type"}:
        return isinstance(one["type"], list) and "string" in one["type"]
    if words != {"anyOf"} or not isinstance(one["anyOf"], list):
        return False
    plain = [isinstance(part, dict) and _words(part) == {"type"} for part in one["anyOf"]]
    return all(plain) and any(part["type"] == "string" for part in one["anyOf"])
