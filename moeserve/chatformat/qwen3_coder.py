"""The inside of a call in Qwen3-Coder's format:

    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>

Values are plain text; what they are in JSON follows from the tool's own schema. One line end on either side of a
value belongs to the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Final

from .events import CallArguments, CallEnd, CallStart, Event
from .json_scanner import Status, to_json

FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_VALUE_ENDS: Final = ("</parameter>", "\n</parameter>")
_WORDS: Final[Mapping[str, Any]] = {"True": True, "False": False, "None": None}
_JSON_TYPES: Final[Mapping[type, tuple[str, ...]]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}

Schemas = Mapping[str, Mapping[str, Any]]  # of each tool's arguments, by the tool's name


class _Stage(Enum):
    OPENING = auto()  # <function=
    NAME = auto()
    BETWEEN = auto()  # <parameter= or </function>
    KEY = auto()
    VALUE = auto()


class Qwen3CoderBody:
    """Reads from behind `<tool_call>` to `</function>`. See tool_calls.CallBody."""

    def __init__(self, index: int, schemas: Schemas) -> None:
        self._index = index
        self._schemas = schemas
        self._stage = _Stage.OPENING
        self._text: list[str] = []
        self._held = ""  # of a tag, a name, or what may end a value
        self._properties: Mapping[str, Any] = {}
        self._value: _Value | None = None
        self._num_values = 0
        self.announced = False
        self._shown = 0  # of `_text`: how many characters are in the events
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
            self._shown = len(self._text) - len(self._held)
        return status

    def _push(self, char: str, events: list[Event]) -> Status:
        match self._stage:
            case _Stage.OPENING:
                return self._tag(char, {FUNCTION: self._open})
            case _Stage.NAME:
                return self._word(char, lambda name: self._name(name, events))
            case _Stage.BETWEEN:
                closing = {_PARAMETER: self._key, _FUNCTION_END: lambda: self._end(events)}
                return self._tag(char, closing)
            case _Stage.KEY:
                return self._word(char, lambda key: self._begin_value(key, events))
            case _Stage.VALUE:
                return self._value_text(char, events)

    # ---- the parts of the format

    def _tag(self, char: str, then: Mapping[str, Callable[[], Status]]) -> Status:
        """White space and one of the tags that are the keys of `then`."""
        if not self._held and char.isspace():
            return Status.GOING
        held = self._held + char
        if held in then:
            self._held = ""
            return then[held]()
        if any(tag.startswith(held) for tag in then):
            self._held = held
            return Status.GOING
        self.unread = held
        return Status.BROKEN

    def _word(self, char: str, then: Callable[[str], Status]) -> Status:
        """A name up to `>`."""
        if char == ">" and self._held:
            held, self._held = self._held, ""
            return then(held)
        if char in ">\n":
            self.unread = char
            return Status.BROKEN
        self._held += char
        return Status.GOING

    def _open(self) -> Status:
        self._stage = _Stage.NAME
        return Status.GOING

    def _name(self, name: str, events: list[Event]) -> Status:
        self._stage = _Stage.BETWEEN
        self.announced = True
        properties = self._schemas.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        events.append(CallStart(self._index, name))
        return Status.GOING

    def _key(self) -> Status:
        self._stage = _Stage.KEY
        return Status.GOING

    def _begin_value(self, key: str, events: list[Event]) -> Status:
        self._stage = _Stage.VALUE
        separator = ", " if self._num_values else "{"
        self._num_values += 1
        self._value = _Value(types_of(self._properties.get(key)))
        before = f"{separator}{to_json(key)}: "
        events.append(CallArguments(self._index, before + self._value.begin()))
        return Status.GOING

    def _value_text(self, char: str, events: list[Event]) -> Status:
        assert self._value is not None
        held = self._held + char
        if held in _VALUE_ENDS:
            self._held = ""
            self._stage = _Stage.BETWEEN
            self._emit(self._value.end(), events)
        elif any(end.startswith(held) for end in _VALUE_ENDS):
            self._held = held
        else:  # only the ends' first characters can begin one anew, and only this one can be it
            keep = len(held) - 1 if char in "\n<" else len(held)
            self._held = held[keep:]
            self._emit(self._value.push(held[:keep]), events)
        return Status.GOING

    def _end(self, events: list[Event]) -> Status:
        events += [CallArguments(self._index, "}" if self._num_values else "{}"), CallEnd(self._index)]
        return Status.DONE

    def _emit(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(CallArguments(self._index, text))


class _Value:
    """One parameter's text on its way to JSON: a string as it comes, everything else when it is whole."""

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._is_string = types <= {"string"}  # where the schema says nothing, too
        self._begun = False
        self._text: list[str] = []

    def begin(self) -> str:
        return '"' if self._is_string else ""

    def push(self, text: str) -> str:
        """The JSON that can be shown now."""
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        if self._is_string:
            return _escaped(text)
        self._text.append(text)
        return ""

    def end(self) -> str:
        return '"' if self._is_string else _typed("".join(self._text), self._types)


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a property's schema allows; empty where it does not say."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list):
            for option in options:
                types |= types_of(option)
    listed = schema.get("enum")
    values: list[Any] = [*listed] if isinstance(listed, list) else []
    if "const" in schema:
        values.append(schema["const"])
    for value in values:
        types.add(_JSON_TYPES.get(type(value), ("string",))[0])
    return frozenset(one for one in types if isinstance(one, str))


def _typed(text: str, types: frozenset[str]) -> str:
    """The JSON of the value that the text stands for, among the types; as a string where it stands for none."""
    word = text.strip()
    try:
        value = _WORDS[word] if word in _WORDS else json.loads(word)
        if types & set(_JSON_TYPES.get(type(value), ())):
            return to_json(value)
    except (ValueError, RecursionError):  # no JSON, NaN, or beyond what Python takes
        pass
    return to_json(text)


def _escaped(text: str) -> str:
    return to_json(text)[1:-1]
