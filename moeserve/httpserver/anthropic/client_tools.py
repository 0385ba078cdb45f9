"""Anthropic's tools that the client runs and that a request names by type only, without a schema: shell, text editor,
memory.

Models get functions only, so each tool becomes a function whose parameters are the fields of the tool's calls.

Source: Anthropic's documentation of its bash, text editor and memory tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pydantic_core import PydanticCustomError

from moeserve.httpserver.generation.chat.object_schema import object_schema


class _ClientTool(NamedTuple):
    description: str
    parameters: dict[str, Any]


_TEXT: Final = {"type": "string"}
_LINE: Final = {"type": "integer"}
_LINES: Final = {"type": "array", "items": _LINE, "minItems": 2, "maxItems": 2}


def _files(commands: tuple[str, ...], **further: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON Schema of a tool whose commands read and change texts."""
    return object_schema(
        ("command",),
        command={"type": "string", "enum": list(commands)},
        path={**_TEXT, "description": "Absolute path of a file or folder."},
        view_range={**_LINES, "description": "For view: first and last line, from 1; -1 is the end."},
        file_text={**_TEXT, "description": "For create: the file's content."},
        old_str={**_TEXT, "description": "For str_replace: the text to replace, which must be there once."},
        new_str={**_TEXT, "description": "For str_replace: what takes its place."},
        insert_line={
            **_LINE,
            "description": "For insert: the line after which the text goes; 0: at the top.",
        },
        insert_text={**_TEXT, "description": "For insert: the text."},
        **further,
    )


_EDITS: Final = ("view", "create", "str_replace", "insert")
_TOOLS: Final[Mapping[str, _ClientTool]] = {
    "bash": _ClientTool(
        "Runs a command in a bash session that lasts from call to call, and returns what it prints.",
        object_schema(
            (),
            command={**_TEXT, "description": "The command; needed unless restart is true."},
            restart={"type": "boolean", "description": "True begins a new session."},
        ),
    ),
    "text_editor": _ClientTool(
        "Views, creates and edits text files.",
        _files(_EDITS),
    ),
    "memory": _ClientTool(
        "Files under /memories, which outlast this conversation. View that folder before you begin, and write down "
        "what later conversations need.",
        _files(
            (*_EDITS, "delete", "rename"),
            old_path={**_TEXT, "description": "For rename: the path now."},
            new_path={**_TEXT, "description": "For rename: the path afterwards."},
        ),
    ),
}
_DATED: Final = re.compile(r"([a-z_]+)_(\d{8})")
# The last version of the editor with undo_edit; its insert command names the text new_str.
_UNDOES: Final = "20250124"


def as_functions(tools: Any) -> Any:
    """Returns a request's tools with the tools of this table replaced by custom tools. Raises PydanticCustomError for
    computer use, whose results are pictures."""
    return [_as_function(tool) for tool in tools] if isinstance(tools, list) else tools


def _as_function(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or (dated := _DATED.fullmatch(kind)) is None:
        return tool
    name, date = dated.groups()
    if name == "computer":
        message = "a tool of the type {kind} is not supported: its results are pictures"
        raise PydanticCustomError("tools", message, {"kind": repr(kind[:64])})
    if name not in _TOOLS:
        return tool
    described, parameters = _TOOLS[name]
    if name == "text_editor" and date <= _UNDOES:
        parameters = _files((*_EDITS, "undo_edit"))
    if most := tool.get("max_characters"):
        described += f" A view shows {str(most)[:20]} characters at most."
    own = {key: value for key, value in tool.items() if key not in ("type", "max_characters")}
    return {"name": name, "description": described, **own, "type": "custom", "input_schema": parameters}
