"""JSON Schema's keywords: which contain schemas, and which llguidance enforces, refuses or ignores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

_ONE: Final = ("additionalProperties", "additionalItems", "items")
_LIST: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME: Final = ("properties", "patternProperties")
_DEFINITIONS: Final = ("$defs", "definitions")

# Keywords whose subschemas describe the same value as the schema itself.
IN_PLACE: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf"})

# Keywords that llguidance enforces (1.9.1).
ENFORCED: Final = frozenset(
    {
        *IN_PLACE,
        *_ONE,
        *_LIST,
        *_BY_NAME,
        *("type", "const", "enum", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)

# Keywords that restrict a value and that llguidance refuses. All others are annotations.
REFUSED: Final = frozenset(
    {
        *(
            "not",
            "if",
            "then",
            "else",
            "contains",
            "minContains",
            "maxContains",
            "uniqueItems",
            "propertyNames",
        ),
        *(
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "unevaluatedItems",
            "unevaluatedProperties",
        ),
        *("$dynamicRef", "$recursiveRef"),
    }
)

# Formats that llguidance enforces. Every other one is an annotation: JSON Schema says so of unknown formats.
FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)


def subschemas(schema: Any, *, definitions: bool) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the direct subschemas of a schema, each with its relative JSON pointer as steps. definitions: include
    `$defs` and the like, which apply only through a `$ref`."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _ONE and isinstance(value, dict | bool):
            yield (keyword,), value
        elif keyword in _LIST and isinstance(value, list):
            yield from (((keyword, str(index)), one) for index, one in enumerate(value))
        elif (keyword in _BY_NAME or (definitions and keyword in _DEFINITIONS)) and isinstance(value, dict):
            yield from (((keyword, name), one) for name, one in value.items())
