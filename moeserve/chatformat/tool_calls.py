"""Tool calls in the text of an answer, each between tags or several in a block."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from .events import CallBroken, CallStart, Event, Text
from .json_reader import Status
from .offered_names import offered_name


@dataclass(frozen=True, slots=True)
class CallTags:
    """The tags around tool calls. A CallBody reads the text from after `open` to the end of its call."""

    open: str
    close: str  # ends the text that `open` began
    other_opens: tuple[str, ...] = ()  # other spellings of `open`
    bare: str = ""  # also begins a call, without `open`; the body reads it too
    following: str = ""  # begins another call before `close`; the body reads it too
    other_following: str = ""  # the same where a model omits `following`
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
        """Returns, after DONE or BROKEN, the end of the text, which is not part of the call and must be read again."""
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

    def __init__(
        self, body: Callable[[int], CallBody], tags: CallTags, offered: Collection[str] = ()
    ) -> None:
        """body: makes the reader of a call from the call's index. offered: the tools' names."""
        self._new_body = body
        self._tags = tags
        self._offered = offered
        self.openings = tags.openings
        self.starts = frozenset(opening[0] for opening in self.openings)
        self._following = tuple(tag for tag in (tags.following, tags.other_following) if tag)
        self._closings = (tags.close, *tags.ends, *self._following)
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
        self._repeat = ""  # the beginning of an opening tag behind an opening tag
        self._body_is_blank = True  # the body has only white space
        self._is_closed = False  # the closing tag of the last call has come
        # Only white space stands before the call that is being read, and a call before that.
        self._follows_call = False

    @property
    def in_text(self) -> bool:
        """True if no call and no possible call is open."""
        return self._stage is _Stage.TEXT and not self._held

    def anew(self) -> ToolCallParser:
        """Returns a fresh parser for the same format."""
        return ToolCallParser(self._new_body, self._tags, self._offered)

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._push(text, events)
        return events

    def finish(self, ended_by: str | None = None) -> list[Event]:
        """Ends the text as `AnswerParser.finish` does."""
        events: list[Event] = []
        if self._stage is _Stage.CALL and ended_by:
            self._push(ended_by, events)
        if self._stage is _Stage.CALL and self._repeat:
            text, self._repeat = self._repeat, ""
            self._push_body(text, events)
        if self._stage is _Stage.CALL:
            assert self._body is not None
            if ended_by is None or not self._finish_body(self._body, events):
                self._break_off(events)
        elif self._stage is _Stage.CLOSING and ended_by is not None:
            self._forget()  # the beginning of a closing tag
        else:
            self._show(self._held, events)
        return events

    def _finish_body(self, body: CallBody, events: list[Event]) -> bool:
        known = len(events)
        if self._follows_call and not body.raw.strip():
            return True  # an opening tag in the place of the last call's closing one
        has_ended = body.finish(events)
        self._name_tool(events, known)
        return has_ended

    def _name_tool(self, events: list[Event], known: int) -> None:
        """Replaces the names in the events after the first `known` ones by the offered tools' names."""
        for at in range(known, len(events)):
            event = events[at]
            if isinstance(event, CallStart):
                events[at] = CallStart(event.index, offered_name(event.name, self._offered))

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
        self._body_is_blank = True
        self._follows_call = self._after_call
        self._opening = "" if self._after_call else "".join(self._space)
        self._forget()
        self._is_closed = False
        if opening != self._tags.bare and opening not in self._following:
            self._opening += opening
            return
        self._body_is_blank = False
        for char in opening:
            self._body.push(char, events)

    def _call(self, char: str, events: list[Event]) -> None:
        assert self._body is not None
        if self._repeat or (char == self._tags.open[:1] and self._body_is_blank):
            text = self._repeat + char
            self._repeat = text if self._tags.open.startswith(text) else ""
            if text == self._tags.open:
                self._begin_again()
            elif not self._repeat:
                self._push_body(text, events)
            return
        self._push_body(char, events)

    def _begin_again(self) -> None:
        """Begins the call anew behind a repeated opening tag."""
        assert self._body is not None
        self._opening += self._body.raw + self._repeat
        self._repeat = ""
        self._body = self._new_body(self._num_calls)

    def _push_body(self, text: str, events: list[Event]) -> None:
        """Gives the text to the call's reader, and the rest that the reader leaves to the parser."""
        assert self._body is not None
        self._body_is_blank &= text.isspace()
        known = len(events)
        rest = text
        status = Status.GOING
        while rest and status is Status.GOING:
            status = self._body.push(rest[0], events)
            rest = rest[1:]
        self._name_tool(events, known)
        if status is Status.GOING:
            return
        unread = self._body.unread + rest
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
        # Models repeat the closing tag.
        closings = (self._tags.close,) if self._is_closed else self._closings
        if held in self._following and not self._is_closed:
            self._begin_call(held, events)
        elif held in closings:
            self._forget()
            self._is_closed |= held == self._tags.close
        elif any(closing.startswith(held) for closing in closings):
            self._held = held
        else:
            self._held = ""
            self._is_closed = False
            self._stage = _Stage.TEXT
            self._push(held, events)

    def _break_off(self, events: list[Event]) -> None:
        assert self._body is not None
        self._stage = _Stage.TEXT
        self._after_call = False
        raw = self._opening + self._body.raw
        if not self._body.raw.strip() and self._body.unread:
            self._space.append(raw)  # models repeat the opening tag; it is text if no call follows
        elif self._body.announced:
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
