"""The tools of /v1/responses that the client runs, and that a request names by type only, without a schema: two shells
and an editor.

Models get functions only, so each tool becomes a function whose parameters are the fields of the tool's calls. One
table says which item a call becomes. The item has the form that the client expects, whatever the model wrote.

Source: OpenAI's API reference (Responses) and its Python client's types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

from moeserve.httpserver.generation.chat.object_schema import object_schema

ToolKind = Literal["local_shell", "shell", "apply_patch"]


class ClientTool(NamedTuple):
    description: str
    parameters: dict[str, Any]
    id_prefix: str  # prefix of a call's id
    field: str  # the field of a call's item for the model's arguments
    value: Callable[[dict[str, Any]], dict[str, Any]]  # converts the model's arguments to that field's value

    def read(self, arguments: str) -> dict[str, Any]:
        """Returns the value of `field`. The model's text may be invalid JSON, or JSON of another form."""
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError):
            given = {}
        return self.value(given if isinstance(given, dict) else {})


def _of_kinds(given: dict[str, Any], **kinds: type) -> dict[str, Any]:
    return {name: given[name] for name, kind in kinds.items() if type(given.get(name)) is kind}


def _exec(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the action of a local shell. If the command is a text instead of a list of words, a shell runs it."""
    command = given.get("command", [])
    if not isinstance(command, list):
        command = ["bash", "-lc", str(command)]
    words = [str(word) for word in command]
    return {"type": "exec", "command": words, "env": {}} | _of_kinds(
        given, working_directory=str, timeout_ms=int
    )


def _commands(given: dict[str, Any]) -> dict[str, Any]:
    commands = given.get("commands", [])
    commands = [str(one) for one in commands] if isinstance(commands, list) else [str(commands)]
    return {"commands": commands} | _of_kinds(given, timeout_ms=int, max_output_length=int)


_PATCHES: Final = ("create_file", "update_file", "delete_file")


def _operation(given: dict[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    operation = {"type": kind if kind in _PATCHES else "update_file", "path": str(given.get("path", ""))}
    return operation if kind == "delete_file" else operation | {"diff": str(given.get("diff", ""))}


_TEXT: Final = {"type": "string"}
_TEXTS: Final = {"type": "array", "items": _TEXT}
_COUNT: Final = {"type": "integer", "minimum": 0}
CLIENT_TOOLS: Final[Mapping[str, ClientTool]] = {
    "local_shell": ClientTool(
        "Runs a program on the user's computer.",
        object_schema(
            ("command",),
            command={**_TEXTS, "description": "The program and its arguments."},
            working_directory=_TEXT,
            timeout_ms=_COUNT,
        ),
        "lsh",
        "action",
        _exec,
    ),
    "shell": ClientTool(
        "Runs shell commands on the user's computer, and returns what each prints and how it ended.",
        object_schema(
            ("commands",),
            commands={**_TEXTS, "description": "Command lines, run one after the other."},
            timeout_ms=_COUNT,
            max_output_length={**_COUNT, "description": "Characters to return of each command's output."},
        ),
        "sh",
        "action",
        _commands,
    ),
    "apply_patch": ClientTool(
        "Creates, updates or deletes a file of the user's by a diff. Its hunks begin with @@ and perhaps a line of the "
        "file that stands before them; their lines begin with a space (context), - (removed) or + (added). A new "
        "file's lines all begin with +.",
        object_schema(
            ("type", "path"),
            type={"type": "string", "enum": list(_PATCHES)},
            path={**_TEXT, "description": "The file's path in the workspace."},
            diff={**_TEXT, "description": "Not for delete_file."},
        ),
        "apc",
        "operation",
        _operation,
    ),
}
