"""The calls of Cohere's models since Command R7B (Command A, North), as a list:

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "name", "parameters": {"key": "value"}},
    {"tool_call_id": "1", "tool_name": "name", "parameters": {}}
]<|END_ACTION|>

A call's id is its number in the conversation.
"""

from __future__ import annotations

from typing import Final

from .guided import GuidedCalls
from .tool_calls import CallTags

TAGS: Final = CallTags("<|START_ACTION|>", "<|END_ACTION|>", following=",", ends=("]", "}"))
GUIDED: Final = GuidedCalls(  # a list with one entry
    open=TAGS.open,
    before_name='[\n    {"tool_call_id": "0", "tool_name": "',
    before_arguments='", "parameters": ',
    behind="}\n]",
    close=TAGS.close,
    separator="",
    is_block=False,
)


def call_id(name: str, number: int) -> str:
    return str(number)
