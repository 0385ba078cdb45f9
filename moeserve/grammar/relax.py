"""Removes from tools' schemas what llguidance cannot enforce.

Tools come from programs that validate the arguments themselves, and their schemas have what no grammar can enforce:
`uniqueItems`, patterns with look-ahead, types that JSON does not have. A call whose arguments keep the rest of the
schema is worth more to such a program than an error. Tools that ask for strict arguments keep the error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from typing import Any, Final

import msgspec

from .spec import Channels, GrammarSpec, GrammarTool, TaggedArgument, WithCalls

# Look-around and back references, which Rust's `regex` crate does not have.
_UNSUPPORTED: Final = re.compile(r"\(\?(<?[=!]|P=)|\\[1-9]|\\k[<{]")
_TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def relaxed(spec: GrammarSpec, strict: Set[str]) -> GrammarSpec | None:
    """Returns the spec with all tools' schemas relaxed except those named in `strict`; None if there is no such
    tool."""
    if not isinstance(spec, WithCalls | Channels):
        return None
    if all(tool.name in strict for tool in spec.tools):
        return None
    return msgspec.structs.replace(spec, tools=_relaxed(spec.tools, strict))


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
