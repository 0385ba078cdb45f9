"""Gemma 4's calls, one after another, whose arguments are close to JSON: keys are bare, and strings stand between tags,
as they are:

<|tool_call>call:name{key:<|"|>text<|"|>,other:{list:[1,true,null]}}<tool_call|>
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Final

from .call_body import MAX_NAME_CHARS, RecordingBody
from .events import CallArguments, CallEnd, CallStart, Event
from .guided import GuidedCalls
from .json_scanner import Status, to_json
from .tool_calls import CallTags

TAGS: Final = CallTags("<|tool_call>", "<tool_call|>")
QUOTE: Final = '<|"|>'
# What a grammar enforces has JSON's strings, in the form of Hermes.
GUIDED: Final = GuidedCalls(TAGS.open, '{"name": "', '", "arguments": ', "}", TAGS.close, "", is_block=False)
_HEAD: Final = re.compile(r"\s*call:\s*([\w.:-]+)\s*")
_SPACE: Final = frozenset(" \t\r\n")
_MAX_DEPTH: Final = 256
_MAX_WORD: Final = 4096  # characters of a number


class _Stage(Enum):
    HEAD = auto()
    KEY_OR_END = auto()  # at the start of an object
    KEY = auto()
    QUOTED_KEY = auto()
    COLON = auto()
    VALUE_OR_END = auto()  # at the start of an array
    VALUE = auto()
    STRING = auto()
    WORD = auto()
    BEHIND = auto()  # a value


class GemmaBody(RecordingBody):
    """Reads from behind the opening tag to the last brace. See tool_calls.CallBody."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._stage = _Stage.HEAD
        self._open: list[str] = []  # brackets

    def _push(self, char: str, events: list[Event]) -> Status:
        match self._stage:
            case _Stage.HEAD:
                return self._head(char, events)
            case _Stage.KEY | _Stage.KEY_OR_END:
                return self._key(char, events)
            case _Stage.STRING | _Stage.QUOTED_KEY:
                return self._quoted(char, events)
            case _Stage.WORD:
                return self._word(char, events)
            case _Stage.VALUE | _Stage.VALUE_OR_END:
                return self._value(char, events)
            case _Stage.COLON:
                return self._colon(char, events)
            case _Stage.BEHIND:
                return self._behind_value(char, events)

    def _head(self, char: str, events: list[Event]) -> Status:
        if char != "{":
            self._held += char
            return Status.GOING if len(self._held) <= MAX_NAME_CHARS else self._broken(char)
        head = _HEAD.fullmatch(self._held)
        if head is None:
            return self._broken(char)
        self._held = ""
        self.announced = True
        events.append(CallStart(self._index, head[1]))
        return self._begin(char, events)

    def _key(self, char: str, events: list[Event]) -> Status:
        """Bare, or in quotes."""
        if not self._held and char in _SPACE:
            return Status.GOING
        if not self._held and char == "}" and self._stage is _Stage.KEY_OR_END:
            return self._end(char, events)
        held = self._held + char
        if held == QUOTE:
            self._held = ""
            self._emit('"', events)
            return self._go(_Stage.QUOTED_KEY)
        if char == ":" and self._held.strip():
            self._emit(to_json(self._held.strip()), events)
            self._held = ""
            return self._colon(char, events)
        if char in "{}[],\n" or len(held) > MAX_NAME_CHARS:
            return self._broken(char)
        self._held = held
        return Status.GOING

    def _colon(self, char: str, events: list[Event]) -> Status:
        if char != ":":
            return Status.GOING if char in _SPACE else self._broken(char)
        self._emit(": ", events)
        return self._go(_Stage.VALUE)

    def _value(self, char: str, events: list[Event]) -> Status:
        if not self._held:
            if char in _SPACE:
                return Status.GOING
            if char in "{[":
                return self._begin(char, events)
            if char == "]" and self._stage is _Stage.VALUE_OR_END:
                return self._end(char, events)
        held = self._held + char
        if QUOTE.startswith(held):
            self._held = held
            if held == QUOTE:
                self._held = ""
                self._emit('"', events)
                return self._go(_Stage.STRING)
            return Status.GOING
        if self._held or char in ",:]}":
            return self._broken(char)
        self._held = char
        return self._go(_Stage.WORD)

    def _quoted(self, char: str, events: list[Event]) -> Status:
        held = self._held + char
        if held == QUOTE:
            self._held = ""
            self._emit('"', events)
            return self._go(_Stage.COLON if self._stage is _Stage.QUOTED_KEY else _Stage.BEHIND)
        if QUOTE.startswith(held):
            self._held = held
            return Status.GOING
        keep = len(held) - (char == QUOTE[0])  # only its first character can begin the quote anew
        self._held = held[keep:]
        self._emit(to_json(held[:keep])[1:-1], events)
        return Status.GOING

    def _word(self, char: str, events: list[Event]) -> Status:
        """A number, true, false or null."""
        if char not in ",]}":
            self._held += char
            return Status.GOING if len(self._held) <= _MAX_WORD else self._broken(char)
        word = self._held.strip()
        try:
            value = None if word == "None" else json.loads(word)
            text = to_json(value)
        except ValueError:
            return self._broken(char)
        self._held = ""
        self._emit(text, events)
        self._go(_Stage.BEHIND)
        return self._behind_value(char, events)

    def _behind_value(self, char: str, events: list[Event]) -> Status:
        if char in _SPACE:
            return Status.GOING
        if char == ",":
            self._emit(", ", events)
            return self._go(_Stage.KEY if self._open[-1] == "{" else _Stage.VALUE)
        return self._end(char, events)

    def _begin(self, char: str, events: list[Event]) -> Status:
        if len(self._open) == _MAX_DEPTH:
            return self._broken(char)
        self._open.append(char)
        self._emit(char, events)
        return self._go(_Stage.KEY_OR_END if char == "{" else _Stage.VALUE_OR_END)

    def _end(self, char: str, events: list[Event]) -> Status:
        if char != {"{": "}", "[": "]"}[self._open[-1]]:
            return self._broken(char)
        self._open.pop()
        self._emit(char, events)
        if self._open:
            return self._go(_Stage.BEHIND)
        events.append(CallEnd(self._index))
        return Status.DONE

    def _go(self, stage: _Stage) -> Status:
        self._stage = stage
        return Status.GOING

    def _emit(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(CallArguments(self._index, text))
