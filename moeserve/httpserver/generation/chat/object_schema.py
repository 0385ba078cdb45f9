"""The JSON Schema of a function's parameters, for tools that a request names by type only."""

from __future__ import annotations

from typing import Any


def object_schema(required: tuple[str, ...], **properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
