"""Tool calls in the text of an answer, each between tags or several in a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from .events import CallBroken, Event, Text
from .json_reader import Status


@dataclass(frozen=True, slots=True)
class CallTags:
    """The tags around tool calls. A CallBody reads the text from after `open` to the end of its call."""

    open: str
    close: str  # ends the text that `open` began
    other_opens: tuple[str, ...] = ()  # other spellings of `open`
    bare: str = ""  # also begins a call, without `open`; the body reads it too
    following: str = ""  # begins another call before `close`; the body reads it too
    ends: tuple[str, ...] = ()  # texts that may come between a call and `close`

    @property
    def openings(self) -> tuple[str, ...]:
        """Returns the tags that begin calls in text."""
        return tuple(tag for tag in (self.open, *self.other_opens, self.bare) if tag)


class CallBody(Protocol):
    """Reads one call."""

    @property
    def announced(self) -> bool:
        """True once a CallStart has been yielded."""
        ...

    @property
    def unread(self) -> str:
        """After DONE or BROKEN: returns the end of the text, which is not part of the call and must be read again."""
        ...

    @property
    def raw(self) -> str:
        """Returns the text so far."""
        ...

    @property
    def rest(self) -> str:
        """Returns the call's text after its last event."""
        ...

    def push(self, char: str, events: list[Event]) -> Status: ...

    def finish(self, events: list[Event]) -> bool:
        """Ends the answer. If the call lacks only closing tags or brackets, adds its last events to `events` and
        returns True."""
        ...


class _Stage(Enum):
    TEXT = auto()
    CALL = auto()
    CLOSING = auto()


class ToolCallParser:
    """Parses text into Text and Call events. White space around calls belongs to the format.

    A call that is malformed before its name is known becomes text. A call that turns out malformed later becomes a
    CallBroken. Reading continues after either. A complete call needs no closing tag.
    """

    def __init__(self, body: Callable[[int], CallBody], tags: CallTags) -> None:
        """body: makes the reader of a call from the call's index."""
        self._new_body = body
        self._tags = tags
        self.openings = tags.openings
        self.starts = frozenset(opening[0] for opening in self.openings)
        following = (tags.following,) if tags.following else ()
        self._closings = (tags.close, *tags.ends, *following)
        self._stage = _Stage.TEXT
        self._body: CallBody | None = None
        # The text before the body: white space, and the opening tag unless the body reads the tag.
        self._opening = ""
        self._num_calls = 0
        self._space: list[
            str
        ] = []  # white space before `_held`; belongs to the format if a call precedes or follows
        self._held = ""  # the beginning of a possible tag
        self._after_call = False

    @property
    def in_text(self) -> bool:
        """True if no call and no possible call is open."""
        return self._stage is _Stage.TEXT and not self._held

    def anew(self) -> ToolCallParser:
        """Returns a fresh parser for the same format."""
        return ToolCallParser(self._new_body, self._tags)

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._push(text, events)
        return events

    def finish(self, ended_by: str | None = None) -> list[Event]:
        """Ends the text as `AnswerParser.finish` does."""
        events: list[Event] = []
        if self._stage is _Stage.CALL and ended_by:
            self._push(ended_by, events)
        if self._stage is _Stage.CALL:
            assert self._body is not None
            if ended_by is None or not self._body.finish(events):
                self._break_off(events)
        else:
            self._show(self._held, events)
        return events

    def _push(self, text: str, events: list[Event]) -> None:
        for char in text:
            match self._stage:
                case _Stage.TEXT:
                    self._text(char, events)
                case _Stage.CALL:
                    self._call(char, events)
                case _Stage.CLOSING:
                    self._closing(char, events)

    def _text(self, char: str, events: list[Event]) -> None:
        if char.isspace() and not self._held:
            self._space.append(char)
            return
        held = self._held + char
        if held in self.openings:
            self._begin_call(held, events)
        elif any(opening.startswith(held) for opening in self.openings):
            self._held = held
        elif char.isspace():
            self._show(self._held, events)
            self._space.append(char)
        else:
            at = self._num_text(held)
            self._show(held[:at], events)
            self._held = held[at:]

    def _num_text(self, held: str) -> int:
        """Returns how many of the first characters of `held` are certainly text. `held` as a whole begins no tag."""
        ends = range(1, len(held))
        begins = (at for at in ends if any(opening.startswith(held[at:]) for opening in self.openings))
        return next(begins, len(held))

    def _begin_call(self, opening: str, events: list[Event]) -> None:
        self._stage = _Stage.CALL
        self._body = self._new_body(self._num_calls)
        self._opening = "" if self._after_call else "".join(self._space)
        self._forget()
        if opening != self._tags.bare and opening != self._tags.following:
            self._opening += opening
            return
        for char in opening:
            self._body.push(char, events)

    def _call(self, char: str, events: list[Event]) -> None:
        assert self._body is not None
        status = self._body.push(char, events)
        if status is Status.GOING:
            return
        unread = self._body.unread
        if status is Status.DONE:
            self._stage = _Stage.CLOSING
            self._num_calls += 1
        else:
            self._break_off(events)
        self._push(unread, events)

    def _closing(self, char: str, events: list[Event]) -> None:
        """Reads white space and tags that belong to the call. The first other character begins text."""
        self._after_call = True
        if char.isspace() and not self._held:
            self._space.append(char)
            return
        held = self._held + char
        if held == self._tags.following:
            self._begin_call(held, events)
        elif held in self._closings:
            self._forget()
            if held == self._tags.close:
                self._stage = _Stage.TEXT
        elif any(closing.startswith(held) for closing in self._closings):
            self._held = held
        else:
            self._held = ""
            self._stage = _Stage.TEXT
            self._push(held, events)

    def _break_off(self, events: list[Event]) -> None:
        assert self._body is not None
        self._stage = _Stage.TEXT
        self._after_call = False
        raw = self._opening + self._body.raw
        if self._body.announced:
            events.append(CallBroken(self._num_calls, raw, self._body.rest))
            self._num_calls += 1
        else:
            events.append(Text(raw))

    def _show(self, text: str, events: list[Event]) -> None:
        """Yields the text. Held white space comes first, unless it follows a call."""
        shown = text if self._after_call else "".join(self._space) + text
        self._forget()
        if shown:
            self._after_call = False
            events.append(Text(shown))

    def _forget(self) -> None:
        self._space.clear()
        self._held = ""
