"""Kimi-K2's calls. A section holds any number of them. The number after the name is the call's number in the
conversation:

<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{"key": "value"}
<|tool_call_end|><|tool_calls_section_end|>

A real answer has no line end there. Some models name the section `tool_call_section`, or omit its tags.
"""

from __future__ import annotations

import re
from typing import Final

from .guided import GuidedCalls
from .separated import SeparatedSyntax
from .tool_calls import CallTags

CALL_OPEN: Final = "<|tool_call_begin|>"
SEPARATOR: Final = "<|tool_call_argument_begin|>"
CALL_CLOSE: Final = "<|tool_call_end|>"
TOOLS: Final = "functions."  # prefix of a tool's name
_NUMBER: Final = re.compile(r":\d+$")  # suffix of a tool's name
_OTHER_CLOSE: Final = "<|tool_call_section_end|>"

TAGS: Final = CallTags(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    other_opens=("<|tool_call_section_begin|>",),
    bare=CALL_OPEN,
    following=CALL_OPEN,
    ends=(CALL_CLOSE, _OTHER_CLOSE, "```"),
)


def call_id(name: str, number: int) -> str:
    return f"{TOOLS}{name}:{number}"


def name_of(text: str) -> str:
    """Returns the tool's name; "" if there is none."""
    name = _NUMBER.sub("", text.strip()).removeprefix(TOOLS)
    return "" if any(char.isspace() for char in name) else name


SYNTAX: Final = SeparatedSyntax(
    CALL_OPEN,
    SEPARATOR,
    CALL_CLOSE,
    (TAGS.close, _OTHER_CLOSE),
    name_of=name_of,
    needs_separator=False,
)
GUIDED: Final = GuidedCalls(
    open=TAGS.open,
    before_name=CALL_OPEN + TOOLS,
    before_arguments=SEPARATOR,
    numbered=True,
    behind=CALL_CLOSE,
    close=TAGS.close,
    separator="",
    is_block=True,
)
