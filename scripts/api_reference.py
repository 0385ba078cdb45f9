"""An OpenAPI document as Markdown pages, one an API: each endpoint with its fields, then the objects they are made of.

An object that one API uses is on that API's page; an object that several use is on the shared page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]


@dataclass(frozen=True)
class ApiPage:
    """One page: the endpoints whose paths begin with one of the prefixes."""

    name: str  # of the file, without .md
    title: str
    prefixes: tuple[str, ...]


# The first page whose prefix fits has the endpoint.
API_PAGES = (
    ApiPage("batches", "Files and batches", ("/v1/files", "/v1/batches", "/v1/messages/batches")),
    ApiPage("openai", "OpenAI API", ("/v1/completions", "/v1/chat/completions")),
    ApiPage("responses", "OpenAI responses API", ("/v1/responses",)),
    ApiPage("anthropic", "Anthropic API", ("/v1/messages",)),
    ApiPage("lightllm", "LightLLM API", ("/generate",)),
    ApiPage("llama_server", "llama-server API", ("/completion", "/infill", "/props", "/apply-template")),
    ApiPage("ollama", "Ollama API", ("/api/",)),
    ApiPage("mcp", "MCP servers' tools", ("/v1/mcp",)),
    ApiPage(
        "native",
        "Native API",
        (
            *("/tokenize", "/detokenize", "/tokenizer_info", "/v1/experts", "/v1/models", "/health"),
            *("/v1/loads", "/version", "/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        ),
    ),
)
SHARED = "shared"

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


class ApiReference:
    """The pages of one document. Raises ValueError for an endpoint that no page of API_PAGES takes."""

    def __init__(self, document: Schema) -> None:
        self._schemas: dict[str, Schema] = document["components"]["schemas"]
        self._endpoints: dict[str, list[tuple[str, str, Schema]]] = {page.name: [] for page in API_PAGES}
        for path, methods in document["paths"].items():
            name = _page_of(path).name
            for method, operation in methods.items():
                self._endpoints[name].append((method.upper(), path, operation))
        self._page_of_object: dict[str, str] = {}  # the page's name
        for name, endpoints in self._endpoints.items():
            for one in self._reachable(operation for _, _, operation in endpoints):
                self._page_of_object[one] = SHARED if one in self._page_of_object else name

    def index(self) -> Iterator[str]:
        """A table of all endpoints, without a page title."""
        yield from ("| endpoint | page | |", "|---|---|---|")
        for page in API_PAGES:
            for method, path, operation in self._endpoints[page.name]:
                link = f"[{page.name}.md]({page.name}.md#{_slug(f'{method} {path}')})"
                yield f"| `{method} {path}` | {link} | {_first_sentence(_about(operation))} |"

    def page(self, name: str) -> Iterator[str]:
        """Line by line, without a page title; `name` is that of an API's page or SHARED."""
        for method, path, operation in self._endpoints.get(name, ()):
            yield from self._endpoint(name, method, path, operation)
        objects = sorted(one for one, page in self._page_of_object.items() if page == name)
        if objects:
            yield from ("## Objects", "")
        for one in objects:
            yield from self._object(name, one)

    def _reachable(self, operations: Iterable[Schema]) -> list[str]:
        """Names of the objects that the operations' pages describe, each once: answers and what fields are made of."""
        found: list[str] = []
        for operation in operations:
            names = []
            if "requestBody" in operation:
                (content,) = operation["requestBody"]["content"].values()
                names = _references(self._shown_fields(_name_of(content["schema"])))
            names += [_name_of(schema) for _, _, schema, _ in _answers(operation)]
            found += [name for name in dict.fromkeys(names) if name not in found]
        for name in found:  # grows while it is walked: an object's fields name others
            found += [one for one in dict.fromkeys(_references(self._shown_fields(name))) if one not in found]
        return found

    def _shown_fields(self, name: str) -> list[Schema]:
        fields = self._schemas[name].get("properties", {}).values()
        return [field for field in fields if not field.get("deprecated")]

    def _endpoint(self, page: str, method: str, path: str, operation: Schema) -> Iterator[str]:
        yield from (f"## `{method} {path}`", "", _about(operation), "")
        if "requestBody" in operation:
            (content,) = operation["requestBody"]["content"].values()
            yield from self._fields(page, self._schemas[_name_of(content["schema"])])
        for status, media_type, schema, about in _answers(operation):
            if media_type == "application/json":
                note = "" if about in ("Successful Response", "Service Unavailable") else f" {about}"
                yield from (f"Answers {status} with {self._type(page, schema)}.{note}", "")
            else:
                yield from (f"Streams {self._type(page, schema)} as `{media_type}`.", "")

    def _object(self, page: str, name: str) -> Iterator[str]:
        schema = self._schemas[name]
        yield from (f"### {name}", "")
        if "description" in schema:
            yield from (_one_line(schema["description"]), "")
        yield from self._fields(page, schema)

    def _fields(self, page: str, schema: Schema) -> Iterator[str]:
        properties = schema.get("properties", {})
        refused = [name for name, field in properties.items() if field.get("deprecated")]
        required = set(schema.get("required", ()))
        shown = [(name, field) for name, field in properties.items() if name not in refused]
        if shown:
            yield from ("| field | type | default | |", "|---|---|---|---|")
        for name, field in sorted(shown, key=lambda pair: pair[0] not in required):
            default = "required" if name in required else _default(field)
            yield f"| `{name}` | {self._type(page, field)} | {default} | {_cell(_description(field))} |"
        if shown:
            yield ""
        if refused:
            names = ", ".join(f"`{name}`" for name in refused)
            yield from (f"Refused by name, unless the value asks for nothing: {names}.", "")

    def _type(self, page: str, field: Schema) -> str:
        """In words, with the bounds and with links to the objects' descriptions, as seen from a page."""
        if "$ref" in field:
            name = _name_of(field)
            where = self._page_of_object[name]
            return f"[{name}]({'' if where == page else f'{where}.md'}#{name.lower()})"
        for key in ("anyOf", "oneOf"):
            if key in field:
                kinds = [self._type(page, one) for one in field[key] if one.get("type") != "null"]
                return " or ".join(dict.fromkeys(kinds))
        if "const" in field:
            return f"`{json.dumps(field['const'])}`"
        if "enum" in field:
            return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
        kind = field.get("type", "any JSON")
        if kind == "array":
            inner = self._type(page, field.get("items", {}))
            kind = f"array of ({inner})" if "," in inner or " or " in inner else f"array of {inner}"
        bounds = [
            text.format(field[key])
            for key, text in _BOUNDS
            if abs(field.get(key, _LARGEST)) < _LARGEST and not (key == "maxLength" and kind == "object")
        ]
        return ", ".join([kind, *bounds])


def _page_of(path: str) -> ApiPage:
    for page in API_PAGES:
        if path.startswith(page.prefixes):
            return page
    raise ValueError(f"{path} has no page: add its prefix to API_PAGES in scripts/api_reference.py")


def _answers(operation: Schema) -> Iterator[tuple[str, str, Schema, str]]:
    """(status, media type, reference to an object, description) of what the operation answers with. Errors, which all
    operations share (4XX and 5XX), are left out."""
    for status, response in operation["responses"].items():
        if not status.isdigit():
            continue
        for media_type, content in response.get("content", {}).items():
            if "$ref" in content.get("schema", {}):
                yield status, media_type, content["schema"], response.get("description", "")


def _references(fields: Iterable[Schema]) -> list[str]:
    """Names of the objects that fields name in their types, at any depth of the types."""
    found = []
    for field in fields:
        if "$ref" in field:
            found.append(_name_of(field))
            continue
        inner = [*field.get("anyOf", ()), *field.get("oneOf", ())]
        if field.get("type") == "array" and not inner:
            inner = [field.get("items", {})]
        found += _references(inner)
    return found


def _about(operation: Schema) -> str:
    return str(operation.get("description", operation["summary"]))


def _first_sentence(text: str) -> str:
    return _cell(text).split(". ")[0].rstrip(".") + "."


def _slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


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
