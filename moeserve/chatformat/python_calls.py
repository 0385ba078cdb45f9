"""LFM2's calls: a list of Python function calls with keyword arguments, in tags.

<|tool_call_start|>[f(key="value", other=[1, {"a": True}]), g()]<|tool_call_end|>

Its templates write strings into the history without escapes, so models write unescaped quotes within quotes. With a
JSON schema in the system prompt, models write a list of JSON objects instead (`either_body.py`).
"""

from __future__ import annotations

import re
from typing import Final

from .call_json import CallJson
from .events import Event
from .json_reader import Dialect, Status
from .mistral import list_of_one
from .named_call_body import NamedCallBody
from .tool_calls import CallTags

TAGS: Final = CallTags("<|tool_call_start|>", "<|tool_call_end|>", following=",", ends=("]",))
MARK: Final = "List of tools:"  # a text in the model's chat templates; older templates do not show a call
GUIDED: Final = list_of_one(TAGS.open, TAGS.close)
LIST: Final = "[,"  # characters of a list that may precede a call
_DIALECT: Final = Dialect(colons="=:", is_bare=True)
_NAME: Final = re.compile(r"\s*([\w.:-]+)\s*")


class PythonBody(NamedCallBody):
    """Reads a call from the end of the opening tag, or from a comma, to its closing parenthesis."""

    def __init__(self, index: int) -> None:
        super().__init__(index, _NAME, CallJson((TAGS.close, TAGS.open), _DIALECT, brackets="("), "(")

    def _push(self, char: str, events: list[Event]) -> Status:
        if not self.announced and not self._held and (char.isspace() or char in LIST):
            return Status.GOING
        return super()._push(char, events)
