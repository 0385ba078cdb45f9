"""Mistral's calls. Since 2025 each call is a name and arguments after control tokens; older models write all calls as
one list:

[TOOL_CALLS]name[ARGS]{"key": "value"}[TOOL_CALLS]name[ARGS]{}

[TOOL_CALLS][{"name": "f", "arguments": {"key": "value"}}, {"name": "g", "arguments": {}}]

Models of mid-2025 write `[CALL_ID]` and an id after the name; some omit `[ARGS]`.
"""

from __future__ import annotations

from typing import Final

from .guided import GuidedCalls
from .separated import SeparatedSyntax
from .tool_calls import CallTags

OPEN: Final = "[TOOL_CALLS]"
SEPARATOR: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"

TAGS: Final = CallTags(OPEN, "", following=",", ends=("]",))


def call_id(name: str, number: int) -> str:
    """Returns a call's id: nine letters or digits, as the templates demand."""
    return f"{number:09d}"


def name_of(text: str) -> str:
    """Returns the tool's name; "" if there is none."""
    name = text.partition(CALL_ID)[0].strip()
    return "" if any(char.isspace() for char in name) else name


SYNTAX: Final = SeparatedSyntax("", SEPARATOR, "", (OPEN,), name_of=name_of, needs_separator=False)
GUIDED: Final = GuidedCalls(
    open=OPEN,
    before_name="",
    before_arguments=SEPARATOR,
    behind="",
    close="",
    separator="",
    is_block=False,
)


def list_of_one(open_tag: str, close: str = "") -> GuidedCalls:
    """Returns the form of calls that a grammar enforces: each call in tags, as a list with one entry."""
    return GuidedCalls(open_tag, '[{"name": "', '", "arguments": ', "}]", close, "", is_block=False)


GUIDED_LIST: Final = list_of_one(OPEN)
