"""A call of a tagged format whose content may be JSON instead: models sometimes fall back to the Hermes form."""

from __future__ import annotations

from collections.abc import Callable

from .events import Event
from .json_reader import Status
from .tool_calls import CallBody


class EitherBody:
    """A CallBody that reads a call as tags or as JSON; the call's first non-blank character decides which."""

    def __init__(
        self,
        index: int,
        tagged: Callable[[int], CallBody],
        in_json: Callable[[int], CallBody],
        begins_json: str = "{",
        before: str = "",
    ) -> None:
        """begins_json: the characters with which JSON begins. before: characters, besides white space, that may come
        first."""
        self._before = before
        self._index = index
        self._begins_json = begins_json
        self._tagged, self._in_json = tagged, in_json
        self._body: CallBody | None = None
        self._space = ""

    @property
    def announced(self) -> bool:
        return self._body is not None and self._body.announced

    @property
    def unread(self) -> str:
        return "" if self._body is None else self._body.unread

    @property
    def raw(self) -> str:
        return self._space if self._body is None else self._body.raw

    @property
    def rest(self) -> str:
        return self._space if self._body is None else self._body.rest

    def push(self, char: str, events: list[Event]) -> Status:
        if self._body is None:
            if char.isspace() or char in self._before:
                self._space += char
                return Status.GOING
            self._body = (self._in_json if char in self._begins_json else self._tagged)(self._index)
            for space in self._space:
                self._body.push(space, events)
        return self._body.push(char, events)

    def finish(self, events: list[Event]) -> bool:
        return self._body is not None and self._body.finish(events)
