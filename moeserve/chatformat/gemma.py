"""Gemma 4's calls, one after another. The arguments are JSON without quotes around keys; strings stand between tags,
without escapes:

<|tool_call>call:name{key:<|"|>text<|"|>,other:{list:[1,true,null]}}<tool_call|>

Models also write JSON and Python strings, words without quotes, `key=value`, Python's parentheses around the arguments
or around their braces, and no comma between them.
"""

from __future__ import annotations

import re
from typing import Final

from .call_body import MAX_NAME_CHARS
from .call_json import CallJson
from .events import Event
from .guided import GuidedCalls
from .json_reader import Dialect, Status
from .named_call_body import NamedCallBody
from .tool_calls import CallTags

TAGS: Final = CallTags("<|tool_call>", "<tool_call|>", other_opens=("<|tool_call|>",), ends=("}", ")"))
QUOTE: Final = '<|"|>'
# A grammar enforces the Hermes form, with JSON strings.
GUIDED: Final = GuidedCalls(TAGS.open, '{"name": "', '", "arguments": ', "}", TAGS.close, "", is_block=False)
_DIALECT: Final = Dialect(quotes=(QUOTE, '"', "'"), raw_quote=QUOTE, colons=":=", is_bare=True)
_HEAD: Final = re.compile(r"\s*(?:call\s*:)?\s*([\w.:-]+?)\s*:?\s*")


class GemmaBody(NamedCallBody):
    """Reads a call, from the end of its opening tag to the last bracket of its arguments."""

    def __init__(self, index: int) -> None:
        super().__init__(index, _HEAD, CallJson((TAGS.close, TAGS.open), _DIALECT, brackets="{("), "{(")
        self._lead = ""  # a parenthesis and white space, before it is known whether a brace follows

    def _push(self, char: str, events: list[Event]) -> Status:
        is_blank = bool(self._lead) and char.isspace() and len(self._lead) < MAX_NAME_CHARS
        if not self.announced and (is_blank or (char == "(" and not self._lead)):
            self._lead += char
            return Status.GOING
        lead, self._lead = self._lead, ""
        for one in "" if char == "{" else lead:  # the parenthesis around braces is left out
            if (status := super()._push(one, events)) is not Status.GOING:
                return status
        return super()._push(char, events)
