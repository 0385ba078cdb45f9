"""A call in JSON without the format's tags, at the end of an answer. Models whose calls are JSON in tags leave the tags
out, mostly in short answers.

Only unmistakable text is read as a call: the whole answer, or its last paragraph, is one JSON object that begins with
the name of an offered tool (or with OpenAI's type and then the name) and has an object of arguments. Everything else
stays text. Text is held back only while it may still become such a call.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from .events import CallBroken, CallStart, Event, Text
from .hermes import HermesBody
from .json_reader import Status
from .offered_names import offered_name
from .tool_calls import CallTags

_HEADS: Final = ('{"name":"', '{"type":"function","name":"')  # without white space
_LIST: Final = "["  # may stand around the object


class BareCalls:
    """Reads the events of a parsed answer. Replaces the text of a call without tags by the call's events."""

    def __init__(self, offered: Collection[str], tags: CallTags) -> None:
        """offered: the tools that may be called. tags: of the format; the closing tag may follow the call."""
        self._offered = offered
        self._tags = tags
        self._num_calls = 0  # before this one
        self._is_first = True  # only white space has come
        self._space = ""  # white space since a line end, or since the beginning
        self._held = ""  # the possible call, from its first bracket on
        self._body: HermesBody | None = None  # reads `_held`
        self._call: list[Event] = []
        self._is_named = False  # `_held` names an offered tool
        self._behind: str | None = None  # the text behind the object; None: the object is not complete

    def read(self, events: list[Event]) -> list[Event]:
        """Returns the events without text that is held back."""
        read: list[Event] = []
        for event in events:
            if isinstance(event, Text):
                self._text(event.text, read)
                continue
            self._release(read)
            if isinstance(event, CallStart | CallBroken):
                self._num_calls = event.index + 1
                self._is_first = False
            read.append(event)
        return read

    def finish(self, has_ended: bool) -> list[Event]:
        """Ends the answer. has_ended: the model ended it. Returns the call's events, or the text that was held back."""
        if has_ended and self._body is not None and self._is_named:
            is_complete = self._behind is not None or self._body.finish(self._call)
            if is_complete and self._left_behind().strip() in ("", self._tags.close):
                return self._call
        read: list[Event] = []
        self._release(read)
        return read

    def _text(self, text: str, read: list[Event]) -> None:
        if self._body is None and not self._is_first and not self._space and "\n" not in text:
            read.append(Text(text))
            return
        for char in text:
            if self._body is not None:
                self._take(char, read)
            elif char.isspace() and (self._is_first or self._space or char == "\n"):
                self._space += char
            elif char in "{" + _LIST and (self._is_first or self._space.count("\n") > 1):
                self._body = HermesBody(self._num_calls, self._tags, needs_arguments=True)
                self._take(char, read)
            else:
                read.append(Text(self._space + char))
                self._space, self._is_first = "", False

    def _take(self, char: str, read: list[Event]) -> None:
        """Reads a character of the possible call."""
        assert self._body is not None
        self._held += char
        if self._behind is not None:
            self._behind += char
            may_be = self._tags.close.startswith(self._left_behind().strip())
        else:
            status = self._body.push(char, self._call)
            may_be = status is not Status.BROKEN and (self._is_named or self._may_name_a_tool())
            if status is Status.DONE:
                self._behind = ""
                may_be = self._has_offered_name()
        if not may_be:
            self._release(read)

    def _left_behind(self) -> str:
        """Returns the text behind the object, without what belongs to the call."""
        behind = (self._behind or "").lstrip()
        return behind.removeprefix("]") if self._held.startswith(_LIST) else behind

    def _may_name_a_tool(self) -> bool:
        """Returns whether the text so far is the beginning of a call of an offered tool."""
        text = "".join(self._held.split()).removeprefix(_LIST)
        head = next((one for one in _HEADS if text.startswith(one)), None)
        if head is None:
            return any(one.startswith(text) for one in _HEADS)
        name, has_end, _ = text.removeprefix(head).partition('"')
        self._is_named = bool(has_end) and offered_name(name, self._offered) in self._offered
        return self._is_named or (not has_end and len(name) <= max(map(len, self._offered), default=0) + 32)

    def _has_offered_name(self) -> bool:
        for at, event in enumerate(self._call):
            if isinstance(event, CallStart):
                self._call[at] = CallStart(event.index, offered_name(event.name, self._offered))
                return self._is_named
        return False

    def _release(self, read: list[Event]) -> None:
        """Gives up the possible call."""
        if self._space or self._held:
            read.append(Text(self._space + self._held))
        self._is_first = self._is_first and not self._held
        self._space = self._held = ""
        self._body, self._call, self._is_named, self._behind = None, [], False, None
