"""OpenAI's `custom` tools, whose input is free text. Models get functions only, so each custom tool becomes a function
with one argument.

A tool's grammar is described to the model but not enforced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from moeserve.httpserver.generation.request.tool_use import Tool

INPUT: Final = "input"  # the argument that has the text
_PARAMETERS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The tool's whole input, as plain text."}},
    "required": [INPUT],
    "additionalProperties": False,
}


def custom_tool(name: str, description: str | None, format: Mapping[str, Any] | None) -> Tool:
    """Returns the tool. format: the API's object, with a grammar in it or (chat completions) in its `grammar`."""
    described = description or ""
    form = format or {}
    if isinstance(inner := form.get("grammar"), dict):
        form = inner
    if isinstance(grammar := form.get("definition"), str):
        described += f"\n\nThe input has this form ({form.get('syntax', 'grammar')}):\n{grammar}"
    return Tool(name, described or None, _PARAMETERS, is_strict=False)


def input_of(arguments: str) -> str:
    """Returns the free text in a custom tool's arguments; the arguments unchanged if the model wrote anything else."""
    try:
        value = json.loads(arguments)[INPUT]
    except (ValueError, KeyError, TypeError, RecursionError):
        return arguments
    return value if isinstance(value, str) else arguments
