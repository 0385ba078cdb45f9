"""The inside of a call with name and JSON between tags that are control tokens: DeepSeek's, Kimi's and Mistral's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from .call_body import MAX_NAME_CHARS, RecordingBody
from .call_json import CallJson
from .events import CallArguments, CallStart, Event
from .json_reader import Status

_FENCES: Final = ("```json", "```")  # Markdown's, before the JSON


@dataclass(frozen=True, slots=True)
class SeparatedSyntax:
    """The parts of a call in order: `open`, the name, `separator`, JSON, `close`. `open` and `close` may be empty."""

    open: str
    separator: str
    close: str
    others: tuple[str, ...]  # other tags that may follow the JSON
    # Precedes the JSON in the form that has `separator` after the tool's kind, and then a line with the name.
    fence: str = ""
    # Extracts the name from the text before `separator`; "" if that text has no name.
    name_of: Callable[[str], str] = str.strip
    needs_separator: bool = True  # False: models omit it, so that `{` follows the name


class _Stage(Enum):
    OPENING = auto()
    HEAD = auto()  # up to the separator
    FORM = auto()  # expects `{`, or a line with the name
    FENCE = auto()
    ARGUMENTS = auto()


class SeparatedBody(RecordingBody):
    """Reads a call from the end of the block's tag to the end of the JSON object. See `tool_calls.CallBody`."""

    def __init__(self, index: int, syntax: SeparatedSyntax) -> None:
        super().__init__(index)
        self._syntax = syntax
        self._stage = _Stage.OPENING if syntax.open else _Stage.HEAD
        self._name = ""
        self._json = CallJson((syntax.close, syntax.open, *syntax.others))

    def finish(self, events: list[Event]) -> bool:
        if self._stage is not _Stage.ARGUMENTS or not self._json.end():
            return False
        self._emit(self._json.shown, events)
        self._done(events)
        return True

    def _num_held(self) -> int:
        return len(self._held) + self._json.num_held

    def _push(self, char: str, events: list[Event]) -> Status:
        match self._stage:
            case _Stage.OPENING if self._held or char.isspace() or char == self._syntax.open[0]:
                return self._tag(char, self._syntax.open, _Stage.HEAD)
            case _Stage.OPENING:  # models omit the tag before the name
                self._stage = _Stage.HEAD
                return self._head(char, events)
            case _Stage.HEAD:
                return self._head(char, events)
            case _Stage.FENCE if char == "{" and not self._held:
                return self._begin(char, events)
            case _Stage.FORM:
                return self._form(char, events)
            case _Stage.FENCE:
                return self._tag(char, self._syntax.fence, _Stage.FENCE)
            case _Stage.ARGUMENTS:
                return self._arguments(char, events)

    def _begin(self, char: str, events: list[Event]) -> Status:
        self._go(_Stage.ARGUMENTS)
        self.announced = True
        events.append(CallStart(self._index, self._name))
        return self._arguments(char, events)

    def _tag(self, char: str, tag: str, then: _Stage) -> Status:
        """Reads white space and the tag."""
        if not self._held and char.isspace():
            return Status.GOING
        held = self._held + char
        if not tag.startswith(held):
            return self._broken(held)
        self._held = held
        return self._go(then) if held == tag else Status.GOING

    def _head(self, char: str, events: list[Event]) -> Status:
        if not self._held and char.isspace():
            return Status.GOING
        held = self._held + char
        if char == "{" and not self._syntax.needs_separator:
            self._name = self._syntax.name_of(self._held)
            return self._begin(char, events) if self._name else self._broken(char)
        if held.endswith(self._syntax.separator):
            self._name = self._syntax.name_of(held.removesuffix(self._syntax.separator))
            return self._go(_Stage.FORM) if self._name else self._broken(char)
        if self._syntax.open and held.strip() == self._syntax.open:
            return self._go(_Stage.HEAD)  # models repeat the tag
        return self._hold(held)

    def _form(self, char: str, events: list[Event]) -> Status:
        """Reads what is between the separator and the JSON: a fence, a repeated separator, or in one form the name."""
        syntax, held = self._syntax, self._held + char
        line = self._held.strip()
        if char == "{" and (syntax.fence or line in ("", *_FENCES)):
            self._name = self._name if line in ("", *_FENCES) else line
            return self._begin(char, events)
        if held.isspace() or held == syntax.separator or (char == "\n" and line in _FENCES):
            self._held = ""
            return Status.GOING
        if held == syntax.close:
            self.announced = True
            events += [CallStart(self._index, self._name), CallArguments(self._index, "{}")]
            return self._done(events, held)
        if syntax.fence and char == "\n":
            self._name = line
            return self._go(_Stage.FENCE)
        if syntax.fence and held.endswith(syntax.separator):
            self._name = held.removesuffix(syntax.separator).strip()
            return self._go(_Stage.FORM)
        goes_on = any(one.startswith(held) for one in (syntax.separator, syntax.close, *_FENCES) if one)
        return self._hold(held) if syntax.fence or goes_on else self._broken(char)

    def _hold(self, held: str) -> Status:
        if len(held) > MAX_NAME_CHARS or held[-1] == "\n":
            return self._broken(held[-1])
        self._held = held
        return Status.GOING

    def _go(self, stage: _Stage) -> Status:
        self._held = ""
        self._stage = stage
        return Status.GOING

    def _arguments(self, char: str, events: list[Event]) -> Status:
        status = self._json.push(char)
        self._emit(self._json.shown, events)
        if status is Status.BROKEN:
            return self._broken(self._json.unread)
        return self._done(events, self._json.unread) if status is Status.DONE else status
