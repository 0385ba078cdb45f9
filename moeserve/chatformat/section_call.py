"""One call of Kimi-K3's: its arguments, each in a tag that says its type, or all of them as one JSON object."""

from __future__ import annotations

from typing import Final

from .call_json import CallJson
from .events import CallArguments, CallBroken, CallEnd, CallStart, Event
from .json_reader import Status
from .json_text import to_json
from .section_tags import Tag
from .values import Schema, ValueReader, argument_types

# The words of an argument's type, which are JSON's; the last one is in no template, but in models' answers.
_TYPES: Final = ("number", "boolean", "null", "object", "array", "integer")


class SectionCall:
    """Reads a call. It is given the text between tags character by character, and says which tags it takes."""

    def __init__(self, index: int, name: str, schema: Schema, raw: str, events: list[Event]) -> None:
        """schema: of the tool's arguments. raw: the call's opening tag. Adds the call's start to `events`."""
        self._index = index
        self._schema = schema
        self._text = [raw]
        self._num_chars = len(raw)  # of the text
        self._shown = len(raw)  # characters of the text that have been yielded as events
        self._keys: list[str] = []
        self._value: ValueReader | None = None
        self._json: CallJson | None = None
        self._json_is_done = False
        events.append(CallStart(index, name))

    @property
    def in_text(self) -> bool:
        """True within a value or JSON, of which tags may be part."""
        return self._value is not None or (self._json is not None and not self._json_is_done)

    @property
    def is_complete(self) -> bool:
        """True after arguments that are one JSON object."""
        return self._json_is_done

    def takes_closing(self, name: str) -> bool:
        """Returns whether a closing tag of this name may stand here: "argument", "json" or none."""
        if self._value is not None:
            return name != "json"
        return not self.in_text or name != "argument"

    def may_follow(self, key: str) -> bool:
        """Returns whether the tool has this argument and it has not come yet."""
        properties = self._schema.get("properties")
        return isinstance(properties, dict) and key in properties and key not in self._keys

    def push(self, char: str, events: list[Event]) -> bool:
        """Takes a character that is no part of a tag. Returns False if it cannot belong to the call."""
        if self._json is None and self._value is None and char == "{" and not self._keys:
            self._json = CallJson(())
        if self._value is not None:
            self._take(char)
            self._emit(self._value.push(char), events)
            return True
        if self._json is None or self._json_is_done:
            if char.isspace():
                self._take(char)
            return char.isspace()
        status = self._json.push(char)
        if status is Status.BROKEN:
            return False
        self._take(char)
        self._json_is_done = status is Status.DONE
        self._emit(self._json.shown, events)
        return True

    def begin_value(self, tag: Tag, raw: str, events: list[Event]) -> bool:
        """Takes an argument's opening tag. Returns False if the call cannot have it."""
        key = tag.attribute("key", "name")
        if not key or self._json is not None or not self._end_value(events):
            return False
        self._take(raw)
        kind = tag.attribute("type").lower()
        is_string = True if kind == "string" else False if kind in _TYPES else None
        self._value = ValueReader(argument_types(self._schema, key), False, is_string)
        separator = ", " if self._keys else "{"
        self._keys.append(key)
        self._emit(f"{separator}{to_json(key)}: {self._value.begin()}", events)
        return True

    def begin_json(self, raw: str) -> bool:
        """Takes the opening tag of arguments in JSON. Returns False if the call cannot have it."""
        if self._keys or self._json is not None:
            return False
        self._take(raw)
        self._json = CallJson(())
        return True

    def close_value(self, raw: str, events: list[Event]) -> bool:
        """Takes the closing tag of a value or of JSON, which may be missing or repeated. Returns False if the JSON
        cannot end here."""
        if not self._end_value(events):
            return False
        self._take(raw)
        return True

    def end(self, events: list[Event]) -> bool:
        """Ends the call. Returns False if the JSON cannot end here."""
        if not self._end_value(events):
            return False
        if self._json is None:
            self._emit("}" if self._keys else "{}", events)
        events.append(CallEnd(self._index))
        return True

    def break_off(self, rest: str, events: list[Event]) -> None:
        """Makes the call text. rest: its end, which has not been pushed."""
        raw = "".join(self._text) + rest
        events.append(CallBroken(self._index, raw, raw[self._shown :]))

    def _end_value(self, events: list[Event]) -> bool:
        if self._value is not None:
            self._emit(self._value.end(), events)
            self._value = None
        if self._json is not None and not self._json_is_done:
            if not self._json.end():
                return False
            self._emit(self._json.shown, events)
            self._json_is_done = True
        return True

    def _take(self, text: str) -> None:
        self._text.append(text)
        self._num_chars += len(text)

    def _emit(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(CallArguments(self._index, text))
            num_held = 0 if self._json is None or self._json_is_done else self._json.num_held
            self._shown = self._num_chars - num_held
