"""The inside of a call whose arguments are plain text in tags: the name, then keys and values alternately.

A `TaggedSyntax` describes each model's variant. A tag that a model omits is implied by the next one: see
`value_end.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, Final

from .call_body import MAX_NAME_CHARS, RecordingBody
from .call_json import CallJson
from .events import CallArguments, CallStart, Event
from .json_reader import Status
from .json_text import to_json
from .offered_names import offered_name
from .tool_calls import CallTags
from .value_end import TaggedSyntax, ValueEnd
from .values import Schemas, ValueReader, argument_types

_BARE_NAME: Final = re.compile(r"[\w.:-]+")
_LINE: Final = re.compile(r"[^\n<]*")


class _Stage(Enum):
    OPENING = auto()
    NAME = auto()
    BETWEEN = auto()  # before a key or the call's end
    KEY = auto()
    VALUE_OPENING = auto()
    VALUE = auto()
    JSON = auto()  # all arguments, as one JSON object


class TaggedBody(RecordingBody):
    """Reads a call from the end of its opening tag to its end. See `tool_calls.CallBody`."""

    def __init__(
        self,
        index: int,
        schemas: Schemas,
        syntax: TaggedSyntax,
        tags: CallTags,
        is_guided: bool = False,
    ) -> None:
        """is_guided: a grammar enforces the tags."""
        super().__init__(index)
        self._schemas = schemas
        self._syntax = syntax
        self._tags = tags
        self._is_guided = is_guided
        self._stage = _Stage.OPENING if syntax.name_open else _Stage.NAME
        self._name = ""
        self._names_offered_tool = False  # otherwise the text is no call
        self._keys: list[str] = []
        self._key_is_string: bool | None = None  # the last key's tag says that its value is a string
        self._value = ValueReader(frozenset(), False)
        self._value_end: ValueEnd | None = None
        closings = (syntax.close, tags.close, tags.open, syntax.name_open)
        self._json = CallJson(tuple(tag for tag in closings if tag))

    def finish(self, events: list[Event]) -> bool:
        if self._value_end is not None:
            text, has_ended = self._value_end.finish()
            self._emit(self._value.push(text), events)
            if not has_ended:
                return False
            if self._end_value(events) is Status.DONE:
                return True
        if self._stage is _Stage.JSON:
            return self._json.end() and self._end_json(events) is Status.DONE
        lacks_bracket = self._held.startswith("</") and self._held + ">" in (
            self._syntax.close,
            self._tags.close,
        )
        if self._stage is not _Stage.BETWEEN or (self._held and not lacks_bracket):
            return False
        if not self._keys and not lacks_bracket:
            return False
        self._end(events)
        return True

    def _num_held(self) -> int:
        num_held = self._json.num_held if self._value_end is None else self._value_end.num_held
        return len(self._held) + num_held

    def _push(self, char: str, events: list[Event]) -> Status:
        syntax = self._syntax
        match self._stage:
            case _Stage.OPENING:
                return self._opening(char)
            case _Stage.NAME if syntax.name_close:
                then_tags = (syntax.key_open, syntax.close)
                return self._word(
                    char, syntax.name_close, then_tags, lambda name: self._set_name(name, events), events
                )
            case _Stage.NAME:
                return self._bare_name(char, events)
            case _Stage.BETWEEN:
                return self._between(char, events)
            case _Stage.KEY:
                implied = (syntax.value_open,) if syntax.value_open else ()
                return self._word(
                    char, syntax.key_close, implied, lambda key: self._set_key(key, events), events
                )
            case _Stage.VALUE_OPENING:
                return self._value_opening(char, events)
            case _Stage.VALUE:
                return self._value_text(char, events)
            case _Stage.JSON:
                return self._arguments(char, events)

    # ---- the parts of the format

    def _opening(self, char: str) -> Status:
        """Reads the name's opening tag. Models write a key's tag with the tool's name in its place."""
        then: dict[str, Callable[[], Status]] = {self._syntax.name_open: lambda: self._go(_Stage.NAME)}
        if not self._is_guided:
            then[self._syntax.key_open] = self._misspelled_opening
        return self._tag(char, then)

    def _misspelled_opening(self) -> Status:
        self._names_offered_tool = True
        return self._go(_Stage.NAME)

    def _tag(self, char: str, then: Mapping[str, Callable[[], Status]]) -> Status:
        """Reads white space and one of the tags in `then`, which maps each tag to the stage after it."""
        if not self._held and char.isspace():
            return Status.GOING
        held = self._held + char
        if held not in then and held[-1].isspace() and held.startswith("</"):
            held = held[:-1] + ">"  # the tag lacks its closing bracket
        if held in then:
            self._held = ""
            return then[held]()
        if any(tag.startswith(held) for tag in then):
            self._held = held
            return Status.GOING
        return self._broken(held)

    def _word(
        self,
        char: str,
        close: str,
        implied: Sequence[str],
        then: Callable[[str], Status],
        events: list[Event],
    ) -> Status:
        """Reads a name up to `close`, or up to white space and a tag that implies `close`."""
        if not self._held and char.isspace() and close.startswith("<"):
            return Status.GOING
        held = self._held + char
        opening = self._syntax.key_open if self._stage is _Stage.KEY else self._syntax.name_open
        if close.startswith("<") and opening.startswith(held):
            self._held = "" if held == opening else held  # models repeat the tag before the name
            return Status.GOING
        tag = next((tag for tag in (close, *implied) if held.endswith(tag)), "")
        if char == "\n" and self._stage is _Stage.KEY and not self._syntax.value_open:
            head = self._syntax.head(self._held)  # the tag lacks its closing bracket
            if head is not None and self._may_follow(head.name):
                status = then(self._held)
                return status if status is not Status.GOING else self._again(char, events)
        if tag:
            word = held.removesuffix(tag)
            word = word if tag == close else word.rstrip()
            if not word:
                return self._broken(char)
            self._held = ""
            status = then(word)
            return status if status is not Status.GOING or tag == close else self._again(tag, events)
        rest = held[_LINE.match(held).end() :].lstrip()  # type: ignore[union-attr]  # it matches every text
        goes_on = any(one.startswith(rest) for one in (close, *implied)) and (implied or "\n" not in held)
        if not goes_on or len(held) > MAX_NAME_CHARS:
            return self._broken(char)
        self._held = held
        return Status.GOING

    def _bare_name(self, char: str, events: list[Event]) -> Status:
        if not char.isspace() and char not in "<{":
            self._held += char
            fits = _BARE_NAME.fullmatch(char) and len(self._held) <= MAX_NAME_CHARS
            return Status.GOING if fits else self._broken(char)
        if not self._held:
            return Status.GOING if char.isspace() else self._broken(char)
        self._set_name(self._held, [])
        return Status.GOING if char.isspace() else self._again(char, events)

    def _between(self, char: str, events: list[Event]) -> Status:
        syntax, tags = self._syntax, self._tags
        if char == "{" and not (self._held or self._keys or self._is_guided):
            self._announce(_Stage.JSON, events, "")
            return self._arguments(char, events)
        then: dict[str, Callable[[], Status]] = {
            syntax.key_open: lambda: self._announce(_Stage.KEY, events, syntax.key_open),
            syntax.close: lambda: self._end(events),
        }
        for tag in (tags.close, tags.open, syntax.name_open) if self._keys else (tags.close,):
            if tag:
                then.setdefault(tag, partial(self._end, events, tag))
        if syntax.other_key_open:
            then[syntax.other_key_open] = lambda: self._announce(_Stage.KEY, events, syntax.other_key_open)
        if not self._keys:  # models write closing tags without opening ones
            then[syntax.value_close] = lambda: Status.GOING
            if syntax.value_open:
                then[syntax.key_close] = lambda: self._split_name(events)
                if not self._held and any(key.startswith(char) for key in self._properties()):
                    self._stage = _Stage.KEY
                    return self._push(char, events)
        return self._tag(char, then)

    def _properties(self) -> Mapping[str, Any]:
        properties = self._schemas.get(self._name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def _split_name(self, events: list[Event]) -> Status:
        """Reads a key that follows the name without the tag between them."""
        for name, schema in self._schemas.items():
            key = self._name.removeprefix(name)
            properties = schema.get("properties")
            if key != self._name and isinstance(properties, Mapping) and key in properties:
                self._name = name
                return self._set_key(key, events)
        return self._broken(self._syntax.key_close)

    def _arguments(self, char: str, events: list[Event]) -> Status:
        """Reads arguments that the model has written as one JSON object."""
        status = self._json.push(char)
        if status is Status.BROKEN:
            return self._broken(self._json.unread)
        if status is Status.DONE:
            return self._end_json(events)
        self._emit(self._json.shown, events)
        return status

    def _end_json(self, events: list[Event]) -> Status:
        self._emit(self._json.shown, events)
        unread = self._json.unread
        return self._done(events, "" if unread == self._syntax.close else unread)

    def _value_opening(self, char: str, events: list[Event]) -> Status:
        """Reads the value's opening tag, or a text that implies it."""
        if not self._held and char.isspace():
            return Status.GOING
        held = self._held + char
        if held == self._syntax.key_close:  # models repeat it
            self._held = ""
            return Status.GOING
        if any(
            tag.startswith(held)
            for tag in (self._syntax.value_open, self._syntax.key_close, self._syntax.value_close)
        ):
            self._held = held
            return self._begin_value(events) if held == self._syntax.value_open else Status.GOING
        behind = held.removeprefix(self._syntax.value_close)
        if behind != held and not behind.strip():
            self._held = held
            return Status.GOING
        self._begin_value(events)
        # Models write the closing tag for the opening one. Before another tag it ends an empty value.
        return self._again(held if char == "<" else behind, events)

    def _value_text(self, char: str, events: list[Event]) -> Status:
        assert self._value_end is not None
        text, has_ended = self._value_end.push(char)
        self._emit(self._value.push(text), events)
        return self._end_value(events) if has_ended else Status.GOING

    def _again(self, text: str, events: list[Event]) -> Status:
        """Reads text that a part of the call left unread."""
        for at, char in enumerate(text, 1):
            status = self._push(char, events)
            if status is not Status.GOING:
                self.unread += text[at:]
                return status
        return Status.GOING

    def _go(self, stage: _Stage) -> Status:
        self._stage = stage
        return Status.GOING

    def _set_name(self, text: str, events: list[Event]) -> Status:
        head = self._syntax.head(text)
        if head is None:
            return self._broken("")
        self._name = offered_name(head.name, self._schemas)
        if self._names_offered_tool and self._name not in self._schemas:
            return self._broken("")
        self._held = ""
        return self._end(events) if head.is_empty else self._go(_Stage.BETWEEN)

    def _announce(self, stage: _Stage, events: list[Event], tag: str) -> Status:
        """Yields the call's start once the first tag after the name has come: without that tag the text may not be a
        call."""
        if not self.announced:
            self.announced = True
            self._behind = len(tag)
            events.append(CallStart(self._index, self._name))
        return self._go(stage)

    def _set_key(self, text: str, events: list[Event]) -> Status:
        head = self._syntax.head(text)
        if head is None or head.is_empty:
            return self._broken("")
        self._announce(_Stage.KEY, events, text + self._syntax.key_close)
        self._keys.append(head.name)
        self._key_is_string = head.is_string
        return self._go(_Stage.VALUE_OPENING) if self._syntax.value_open else self._begin_value(events)

    def _begin_value(self, events: list[Event]) -> Status:
        self._held = ""
        key = self._keys[-1]
        types = argument_types(self._schemas.get(self._name, {}), key)
        self._value = ValueReader(types, self._syntax.trims_line_ends, self._key_is_string)
        self._value_end = ValueEnd(self._syntax, self._tags, key, self._may_follow, self._is_guided)
        separator = ", " if len(self._keys) > 1 else "{"
        before = f"{separator}{to_json(key)}: "
        events.append(CallArguments(self._index, before + self._value.begin()))
        return self._go(_Stage.VALUE)

    def _may_follow(self, key: str) -> bool:
        """Returns whether the tool has this argument and it has not come yet."""
        return key in self._properties() and key not in self._keys

    def _end_value(self, events: list[Event]) -> Status:
        assert self._value_end is not None
        unread, self._value_end = self._value_end.unread, None
        self._stage = _Stage.BETWEEN
        self._emit(self._value.end(), events)
        return self._again(unread, events)

    def _end(self, events: list[Event], unread: str = "") -> Status:
        self._announce(_Stage.BETWEEN, events, "")
        events.append(CallArguments(self._index, "}" if self._keys else "{}"))
        return self._done(events, unread)
