"""LFM2's calls: a list of Python function calls with keyword arguments, in tags.

<|tool_call_start|>[f(key="value", other=[1, {"a": True}]), g()]<|tool_call_end|>

Its templates write strings into the history without escapes, so models write unescaped quotes within quotes. With a
JSON schema in the system prompt, models write a list of JSON objects instead (`either_body.py`).
"""

from __future__ import annotations

import re
from typing import Final

from .call_body import MAX_NAME_CHARS, RecordingBody
from .call_json import CallJson
from .events import CallStart, Event
from .json_reader import Dialect, Status
from .mistral import list_of_one
from .tool_calls import CallTags

TAGS: Final = CallTags("<|tool_call_start|>", "<|tool_call_end|>", following=",", ends=("]",))
MARK: Final = "List of tools:"  # a text in its templates; older ones do not show a call
GUIDED: Final = list_of_one(TAGS.open, TAGS.close)
LIST: Final = "[,"  # list syntax around calls
_DIALECT: Final = Dialect(colons="=:", is_bare=True)
_NAME: Final = re.compile(r"\s*([\w.:-]+)\s*")


class PythonBody(RecordingBody):
    """Reads from after the opening tag, or a comma, to the closing parenthesis. See `tool_calls.CallBody`."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._json = CallJson((TAGS.close, TAGS.open), _DIALECT, brackets="(")

    def finish(self, events: list[Event]) -> bool:
        if not self.announced or not self._json.end():
            return False
        self._emit(self._json.shown, events)
        self._done(events)
        return True

    def _num_held(self) -> int:
        return len(self._held) + self._json.num_held

    def _push(self, char: str, events: list[Event]) -> Status:
        if not self.announced:
            if not self._held and (char.isspace() or char in LIST):
                return Status.GOING
            if char != "(":
                self._held += char
                return Status.GOING if len(self._held) <= MAX_NAME_CHARS else self._broken(char)
            name = _NAME.fullmatch(self._held)
            if name is None:
                return self._broken(char)
            self._held = ""
            self.announced = True
            events.append(CallStart(self._index, name[1]))
        status = self._json.push(char)
        self._emit(self._json.shown, events)
        if status is Status.BROKEN:
            return self._broken(self._json.unread)
        return self._done(events, self._json.unread) if status is Status.DONE else status
