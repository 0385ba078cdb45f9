"""The state that the readers of a call share: the text so far, and how much of it is in the events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from .events import CallArguments, CallEnd, Event
from .json_reader import Status

MAX_NAME_CHARS: Final = 1024  # of a tool or of an argument; what is longer is no call


class RecordingBody(ABC):
    """A tool_calls.CallBody. Subclasses read in `_push`, and hold in `_held` what they have not decided about."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text: list[str] = []
        self._held = ""
        self._shown = 0  # of `_text`: how many characters are in the events
        self._behind = 0  # of `_text`: how many at its end came after the event that is added now
        self.announced = False
        self.unread = ""

    @property
    def raw(self) -> str:
        """Up to what will be read again."""
        return "".join(self._text).removesuffix(self.unread)

    @property
    def rest(self) -> str:
        return self.raw[self._shown :]

    def push(self, char: str, events: list[Event]) -> Status:
        self._text.append(char)
        known = len(events)
        status = self._push(char, events)
        if len(events) > known:
            self._shown = len(self._text) - self._num_held() - self._behind
            self._behind = 0
        return status

    def finish(self, events: list[Event]) -> bool:
        """See tool_calls.CallBody. Here for calls that nothing but their end can end."""
        return False

    @abstractmethod
    def _push(self, char: str, events: list[Event]) -> Status: ...

    def _num_held(self) -> int:
        return len(self._held)

    def _broken(self, unread: str) -> Status:
        """`unread`: the end of the text, which may be something else's beginning."""
        self.unread = unread
        return Status.BROKEN

    def _done(self, events: list[Event], unread: str = "") -> Status:
        self.unread = unread
        events.append(CallEnd(self._index))
        return Status.DONE

    def _emit(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(CallArguments(self._index, text))
