"""Gemma 4's calls, one after another. Their arguments are close to JSON, but keys have no quotes, and strings stand
between tags without escapes:

<|tool_call>call:name{key:<|"|>text<|"|>,other:{list:[1,true,null]}}<tool_call|>

Models also write JSON and Python strings, words without quotes, and `key=value`.
"""

from __future__ import annotations

import re
from typing import Final

from .call_body import MAX_NAME_CHARS, RecordingBody
from .call_json import CallJson
from .events import CallStart, Event
from .guided import GuidedCalls
from .json_reader import Dialect, Status
from .tool_calls import CallTags

TAGS: Final = CallTags("<|tool_call>", "<tool_call|>", ends=("}",))
QUOTE: Final = '<|"|>'
# A grammar enforces the Hermes form, with JSON strings.
GUIDED: Final = GuidedCalls(TAGS.open, '{"name": "', '", "arguments": ', "}", TAGS.close, "", is_block=False)
_DIALECT: Final = Dialect(quotes=(QUOTE, '"', "'"), raw_quote=QUOTE, colons=":=", is_bare=True)
_HEAD: Final = re.compile(r"\s*(?:call\s*:)?\s*([\w.:-]+)\s*")


class GemmaBody(RecordingBody):
    """Reads from after the opening tag to the last brace. See `tool_calls.CallBody`."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._json = CallJson((TAGS.close, TAGS.open), _DIALECT)

    def finish(self, events: list[Event]) -> bool:
        if not self.announced or not self._json.end():
            return False
        self._emit(self._json.shown, events)
        self._done(events)
        return True

    def _num_held(self) -> int:
        return len(self._held) + self._json.num_held

    def _push(self, char: str, events: list[Event]) -> Status:
        if not self.announced and char != "{":
            self._held += char
            return Status.GOING if len(self._held) <= MAX_NAME_CHARS else self._broken(char)
        if not self.announced:
            head = _HEAD.fullmatch(self._held)
            if head is None:
                return self._broken(char)
            self._held = ""
            self.announced = True
            events.append(CallStart(self._index, head[1]))
        status = self._json.push(char)
        self._emit(self._json.shown, events)
        if status is Status.BROKEN:
            return self._broken(self._json.unread)
        return self._done(events, self._json.unread) if status is Status.DONE else status
