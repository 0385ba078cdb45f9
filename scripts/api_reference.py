"""An OpenAPI document as Markdown: each endpoint with its fields, then the objects that they are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_BOUNDS = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("exclusiveMaximum", "< {}"),
    ("maxLength", "at most {} characters"),
    ("maxItems", "at most {} items"),
    ("maxProperties", "at most {} entries"),
)
_LARGEST = (1 << 31) - 1  # a bound from here on is that of the integer's type and says nothing


def markdown(document: Schema) -> Iterator[str]:
    """Line by line, without a page title."""
    schemas = document["components"]["schemas"]
    used: list[str] = []
    by_tag: dict[str, list[tuple[str, str, Schema]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    for tag, operations in by_tag.items():
        yield f"## {tag}"
        yield ""
        for method, path, operation in operations:
            yield from _endpoint(method, path, operation, schemas, used)
    yield "## Objects"
    yield ""
    for name in used:  # grows while it is walked: an object's fields name others
        yield from _object(name, schemas[name], used)


def _endpoint(
    method: str, path: str, operation: Schema, schemas: dict[str, Schema], used: list[str]
) -> Iterator[str]:
    yield f"### `{method} {path}`"
    yield ""
    yield operation.get("description", operation["summary"])
    yield ""
    if "requestBody" in operation:
        (content,) = operation["requestBody"]["content"].values()
        yield from _fields(schemas[_name_of(content["schema"])], used)
    for status, response in operation["responses"].items():
        for content in response.get("content", {}).values():
            if "$ref" in content.get("schema", {}):
                note = response.get("description", "")
                note = "" if note in ("Successful Response", "Service Unavailable") else f" {note}"
                yield f"Answers {status} with {_type(content['schema'], used)}.{note}"
                yield ""


def _object(name: str, schema: Schema, used: list[str]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if "description" in schema:
        yield _one_line(schema["description"])
        yield ""
    yield from _fields(schema, used)


def _fields(schema: Schema, used: list[str]) -> Iterator[str]:
    properties = schema.get("properties", {})
    refused = [name for name, field in properties.items() if field.get("deprecated")]
    required = set(schema.get("required", ()))
    shown = [(name, field) for name, field in properties.items() if name not in refused]
    if shown:
        yield "| field | type | default | |"
        yield "|---|---|---|---|"
    for name, field in sorted(shown, key=lambda pair: pair[0] not in required):
        default = "required" if name in required else _default(field)
        yield f"| `{name}` | {_type(field, used)} | {default} | {_cell(_description(field))} |"
    if shown:
        yield ""
    if refused:
        yield (
            "Refused by name, unless the value asks for nothing: "
            + ", ".join(f"`{name}`" for name in refused)
            + "."
        )
        yield ""


def _type(field: Schema, used: list[str]) -> str:
    """In words, with the bounds."""
    if "$ref" in field:
        name = _name_of(field)
        if name not in used:
            used.append(name)
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in field:
            kinds = [_type(one, used) for one in field[key] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    kind = field.get("type", "any JSON")
    if kind == "array":
        items = field.get("items", {})
        inner = _type(items, used)
        kind = f"array of ({inner})" if "," in inner or " or " in inner else f"array of {inner}"
    bounds = [
        text.format(field[key])
        for key, text in _BOUNDS
        if abs(field.get(key, _LARGEST)) < _LARGEST and not (key == "maxLength" and kind == "object")
    ]
    return ", ".join([kind, *bounds])


def _default(field: Schema) -> str:
    default = field.get("default")
    return "" if default in (None, "", [], {}) else f"`{json.dumps(default)}`"


def _description(field: Schema) -> str:
    """Its own, or that of the one kind of value that has one."""
    if "description" in field:
        return str(field["description"])
    return next((str(one["description"]) for one in field.get("anyOf", ()) if "description" in one), "")


def _name_of(reference: Schema) -> str:
    return str(reference["$ref"].rpartition("/")[2])


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")
