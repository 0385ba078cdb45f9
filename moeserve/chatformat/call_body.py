"""The state that all readers of a call share: the text so far, and how much of it has been yielded as events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from .events import CallArguments, CallEnd, Event
from .json_reader import Status

MAX_NAME_CHARS: Final = 1024  # the longest name of a tool or argument; text with a longer name is not a call


class RecordingBody(ABC):
    """A `tool_calls.CallBody`. Subclasses read in `_push`, and keep undecided text in `_held`."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text: list[str] = []
        self._held = ""
        self._shown = 0  # characters of `_text` that have been yielded as events
        self._behind = 0  # characters at the end of `_text` that belong to no event added so far
        self.announced = False
        self.unread = ""

    @property
    def raw(self) -> str:
        """Returns the call's text so far, without the end that is not part of the call."""
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
        """See `tool_calls.CallBody`. By default a call without its end is incomplete."""
        return False

    @abstractmethod
    def _push(self, char: str, events: list[Event]) -> Status: ...

    def _num_held(self) -> int:
        return len(self._held)

    def _broken(self, unread: str) -> Status:
        """Marks the call as malformed. unread: the end of the text, in which another call may begin."""
        self.unread = unread
        return Status.BROKEN

    def _done(self, events: list[Event], unread: str = "") -> Status:
        self.unread = unread
        events.append(CallEnd(self._index))
        return Status.DONE

    def _emit(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(CallArguments(self._index, text))
