"""Removes from schemas what llguidance cannot enforce.

Schemas come from programs that validate arguments and answers themselves, and may contain rules that no grammar can
enforce: `uniqueItems`, patterns with look-ahead, types that JSON does not have. A call or an answer that keeps the rest
of the schema is worth more to such a program than an error; Ollama, llama.cpp and OpenAI's requests that are not strict
pass over it, too. Strict tools and strict answers keep the error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from typing import Any, Final

import msgspec

from .json_schema.keywords import REFUSED, subschemas
from .spec import (
    Channels,
    GrammarSpec,
    GrammarTool,
    JsonOrToolCalls,
    JsonSchema,
    Messages,
    Sections,
    TaggedArgument,
    WholeAnswer,
    WithCalls,
)

# Look-around and back references, which Rust's `regex` crate does not have.
_UNSUPPORTED: Final = re.compile(r"\(\?(<?[=!]|P=)|\\[1-9]|\\k[<{]")
_TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def relaxed(spec: GrammarSpec, strict: Set[str], *, answer: bool = False) -> GrammarSpec | None:
    """Returns the spec with all tools' schemas relaxed except those named in `strict`, and with `answer` the answer's
    schema, too; None if nothing is left to relax."""
    found: GrammarSpec = _with_lenient_answer(spec) if answer else spec
    if isinstance(found, WithCalls | WholeAnswer) and not all(tool.name in strict for tool in found.tools):
        found = msgspec.structs.replace(found, tools=_relaxed(found.tools, strict))
    return None if found is spec else found


def _with_lenient_answer(spec: GrammarSpec) -> GrammarSpec:
    match spec:
        case JsonSchema(schema=schema) | JsonOrToolCalls(schema=schema):
            return msgspec.structs.replace(spec, schema=_expressible(schema))
        case (
            Channels(answer=JsonSchema(schema=schema))
            | Messages(answer=JsonSchema(schema=schema))
            | Sections(answer=JsonSchema(schema=schema))
        ):
            return msgspec.structs.replace(spec, answer=JsonSchema(_expressible(schema)))
    return spec


def _expressible(schema: str) -> str:
    """Leaves out of an answer's schema the keywords that cannot be enforced. What looks like a mistake, such as an
    unknown type, stays and is refused: the client's program reads the answer by this schema."""
    found = _without_refused(json.loads(schema))
    if isinstance(found, dict) and not isinstance(found.get("x-guidance"), dict):
        found |= {"x-guidance": {"coerce_one_of": True}}
    return json.dumps(found)


def _without_refused(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    inner = dict(subschemas(schema, definitions=True))
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name in REFUSED or (name == "pattern" and isinstance(value, str) and _UNSUPPORTED.search(value)):
            continue
        if (name,) in inner:
            value = _without_refused(value)
        elif isinstance(value, dict):
            value = {
                key: _without_refused(one) if (name, key) in inner else one for key, one in value.items()
            }
        elif isinstance(value, list):
            value = [
                _without_refused(one) if (name, str(at)) in inner else one for at, one in enumerate(value)
            ]
        kept[name] = value
    return kept


def _relaxed(tools: Sequence[GrammarTool], strict: Set[str]) -> list[GrammarTool]:
    return [
        tool
        if tool.name in strict
        else msgspec.structs.replace(
            tool,
            schema=_lenient_text(tool.schema),
            arguments=None if tool.arguments is None else [_lenient_argument(one) for one in tool.arguments],
        )
        for tool in tools
    ]


def _lenient_argument(argument: TaggedArgument) -> TaggedArgument:
    schema, other = (
        None if one is None else _lenient_text(one) for one in (argument.schema, argument.other_schema)
    )
    return msgspec.structs.replace(argument, schema=schema, other_schema=other)


def _lenient_text(schema: str) -> str:
    return json.dumps(_lenient(json.loads(schema)))


def _lenient(schema: Any) -> Any:
    """Lets llguidance ignore unknown keywords, and removes unsupported patterns and types."""
    if not isinstance(schema, dict):
        return schema
    own = schema.get("x-guidance")
    return _without_unsupported(schema) | {
        "x-guidance": (own if isinstance(own, dict) else {}) | {"lenient": True}
    }


def _without_unsupported(schema: Any) -> Any:
    """Visits every value that may be a schema. A property named `pattern` is not mistaken for the keyword: its value is
    no string."""
    if isinstance(schema, list):
        return [_without_unsupported(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "pattern" and isinstance(value, str) and _UNSUPPORTED.search(value):
            continue
        if name == "type" and isinstance(value, str) and value not in _TYPES:
            continue
        if name == "patternProperties" and isinstance(value, dict):
            value = {key: one for key, one in value.items() if not _UNSUPPORTED.search(key)}
        kept[name] = (
            value if name in ("enum", "const", "default", "examples") else _without_unsupported(value)
        )
    return kept
