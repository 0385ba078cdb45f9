"""A call that is a name and then arguments close to JSON; it ends with the last bracket of the arguments."""

from __future__ import annotations

import re

from .call_body import MAX_NAME_CHARS, RecordingBody
from .call_json import CallJson
from .events import CallStart, Event
from .json_reader import Status


class NamedCallBody(RecordingBody):
    """Reads a call from the beginning of its name to the end of its arguments. See `tool_calls.CallBody`."""

    def __init__(self, index: int, head: re.Pattern[str], arguments: CallJson, brackets: str) -> None:
        """head: matches what stands before the arguments, with the name as group 1. brackets: the characters with which
        the arguments may begin."""
        super().__init__(index)
        self._head = head
        self._json = arguments
        self._brackets = brackets

    def finish(self, events: list[Event]) -> bool:
        if not self.announced or not self._json.end():
            return False
        self._emit(self._json.shown, events)
        self._done(events)
        return True

    def _num_held(self) -> int:
        return len(self._held) + self._json.num_held

    def _push(self, char: str, events: list[Event]) -> Status:
        if not self.announced and char not in self._brackets:
            self._held += char
            return Status.GOING if len(self._held) <= MAX_NAME_CHARS else self._broken(char)
        if not self.announced:
            head = self._head.fullmatch(self._held)
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
