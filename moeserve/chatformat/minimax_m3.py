"""MiniMax-M3's calls. A block holds any number of them. A special token, the mark, precedes each tag; here it is shown
as `|`:

|<tool_call>
|<invoke name="name">|<key>value|</key>|<list>|<item>1|</item>|<item>2|</item>|</list>|<object>|<key>x|</key>|</object>
|</invoke>
|</tool_call>

The tags inside `<invoke>` are argument names. Values are plain text, objects nested tags, and lists `<item>` tags.
Models also omit the `<` of `<invoke`, an argument's opening or closing tag, and the block's tags, and repeat tags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .call_body import MAX_NAME_CHARS, RecordingBody
from .events import CallArguments, CallStart, Event
from .guided import GuidedCalls
from .json_reader import Status
from .json_text import to_json
from .offered_names import offered_name
from .tool_calls import CallTags
from .values import (
    Schema,
    Schemas,
    ValueReader,
    argument_types,
    item_schema,
    property_schema,
    types_of,
    value_of_text,
)

MARK: Final = "]<]minimax[>["
_INVOKE: Final = '<invoke name="'
_CALL_ENDS: Final = ("</invoke>", "</tool_call>")
TAGS: Final = CallTags(
    f"{MARK}<tool_call>",
    f"{MARK}</tool_call>",
    bare=MARK + _INVOKE,
    following=MARK + _INVOKE,
    ends=(f"{MARK}</invoke>",),
)
# The mark is one token, so a grammar's calls begin with it alone.
GUIDED: Final = GuidedCalls(
    open=MARK,
    before_name='<tool_call>\n{"name": "',
    before_arguments='", "arguments": ',
    behind="}\n",
    close=TAGS.close,
    separator="\n",
    is_block=False,
)
_NAME: Final = re.compile(r'<invoke name="([^"\n]+)">')
_KEY: Final = re.compile(r"<([^/<>\s][^<>\n]*)>")
_MAX_DEPTH: Final = 32  # nesting of elements


@dataclass(slots=True)
class Element:
    """The content of a tag: text, or nested elements by name."""

    key: str
    text: str = ""
    children: list[Element] = field(default_factory=list)


class MiniMaxM3Body(RecordingBody):
    """Reads a call from the end of its opening tag, or from its `<invoke>` if another call precedes it, to `</invoke>`.
    See `tool_calls.CallBody`."""

    def __init__(self, index: int, schemas: Schemas) -> None:
        super().__init__(index)
        self._schemas = schemas
        self._name = ""
        self._keys: list[str] = []
        self._unnamed = ""  # text of a value whose opening tag is missing
        self._open: list[Element] = []  # the open argument and the open elements in it
        self._value: ValueReader | None = None  # reads an argument that is plain text

    def finish(self, events: list[Event]) -> bool:
        """Returns whether the call lacks only its closing tag."""
        if self._held or self._open or self._unnamed or not self._keys:
            return False
        self._end(events)
        return True

    def _num_held(self) -> int:
        return len(self._held)

    def _push(self, char: str, events: list[Event]) -> Status:
        held = self._held + char
        if not self._name and (MARK + _INVOKE[1:]).startswith(held) and not MARK.startswith(held):
            held = held.replace(MARK + _INVOKE[1], MARK + _INVOKE[:2])
        if MARK.startswith(held) or (
            held.startswith(MARK + "<") and char not in ">\n" and len(held) < MAX_NAME_CHARS
        ):
            self._held = held
            return Status.GOING
        if held.startswith(MARK + "<") and char == ">":
            self._held = ""
            return self._tag(held, events)
        at = next(at for at in range(1, len(held) + 1) if MARK.startswith(held[at:]))
        self._held = held[at:]  # the beginning of a possible mark
        return self._text_of_value(held[:at], events)

    def _tag(self, held: str, events: list[Event]) -> Status:
        """Handles a tag. held: the tag after its mark."""
        tag = held.removeprefix(MARK)
        if not self._name:
            found = _NAME.fullmatch(tag)
            if found is None:  # the opening of the call is not read again
                return self._broken("" if tag.startswith(_INVOKE) else held)
            self._name = offered_name(found[1], self._schemas)
            return Status.GOING
        if self._unnamed and tag.startswith("</") and not self._open:
            return self._name_value(tag[2:-1], held, events)
        if self._unnamed:
            return self._broken(held)
        found = None if self.announced else _NAME.fullmatch(tag)
        if found is not None and offered_name(found[1], self._schemas) == self._name:
            return Status.GOING  # models repeat the tag
        if tag in _CALL_ENDS or tag.startswith(_INVOKE):
            while self._open:  # closing tags that the model has omitted
                self._close(events)
            self._announce(held, events)
            return self._end(events, "" if tag == "</invoke>" else held)
        if self._open and tag == f"</{self._open[-1].key}>":
            self._close(events)
            return Status.GOING
        if not self._open and tag[2:-1] in self._keys and tag.startswith("</"):
            return Status.GOING  # models repeat the tag
        found = _KEY.fullmatch(tag)
        if found is not None and self._value is not None and self._may_follow(found[1]):
            self._close(events)  # the value lacks its closing tag
        if found is None or self._value is not None or len(self._open) == _MAX_DEPTH:
            return self._broken(held)
        self._begin(Element(found[1]), held, events)
        return Status.GOING

    def _text_of_value(self, text: str, events: list[Event]) -> Status:
        """Handles text: it belongs to a value; elsewhere only white space is allowed."""
        if not self._open and self._name and text.startswith(MARK) and not self._unnamed:
            self._unnamed = text.removeprefix(MARK)
            return Status.GOING
        if not self._open and self._unnamed:
            self._unnamed += text
            return Status.GOING
        if not self._open or self._open[-1].children:
            return Status.GOING if text.isspace() else self._broken(text + self._held)
        element = self._open[-1]
        if self._value is not None:
            self._emit(self._value.push(text), events)
            return Status.GOING
        element.text += text  # text, or white space before a nested element
        if len(self._open) == 1 and not text.isspace():
            self._begin_text(element, events)
        return Status.GOING

    def _name_value(self, key: str, held: str, events: list[Event]) -> Status:
        """Ends a value without an opening tag: the closing one names it."""
        if not self._may_follow(key):
            return self._broken(held)
        text, self._unnamed = self._unnamed, ""
        self._begin(Element(key, text), held, events)
        self._close(events)
        return Status.GOING

    def _may_follow(self, key: str) -> bool:
        """Returns whether the tool has this argument and it has not come yet."""
        properties = self._schemas.get(self._name, {}).get("properties")
        return isinstance(properties, Mapping) and key in properties and key not in self._keys

    def _begin(self, element: Element, held: str, events: list[Event]) -> None:
        self._announce(held, events)
        if self._open:
            self._open[-1].children.append(element)
        else:
            separator = ", " if self._keys else "{"
            events.append(CallArguments(self._index, f"{separator}{to_json(element.key)}: "))
            self._keys.append(element.key)
        self._open.append(element)

    def _begin_text(self, element: Element, events: list[Event]) -> None:
        types = argument_types(self._schemas.get(self._name, {}), element.key)
        self._value = ValueReader(types, False)
        self._emit(self._value.begin() + self._value.push(element.text), events)

    def _close(self, events: list[Event]) -> None:
        element = self._open.pop()
        if self._open:
            return
        if element.children or not element.text.strip():
            schema = self._schemas.get(self._name, {})
            types = argument_types(schema, element.key)
            if element.children or types & {"array", "object"}:
                self._emit(
                    to_json(_value(element, property_schema(schema, element.key, schema), schema)), events
                )
                return
        if self._value is None:
            self._begin_text(element, events)
        assert self._value is not None
        value, self._value = self._value, None
        self._emit(value.end(), events)

    def _announce(self, held: str, events: list[Event]) -> None:
        """Yields the call's start, with the first tag after the name."""
        if not self.announced:
            self.announced = True
            self._behind = len(held)
            events.append(CallStart(self._index, self._name))

    def _end(self, events: list[Event], unread: str = "") -> Status:
        self._announce("", events)
        events.append(CallArguments(self._index, "}" if self._keys else "{}"))
        return self._done(events, unread)


def _value(element: Element, schema: Schema, root: Schema) -> Any:
    """Returns the element's JSON value. schema: the element's; empty if the tool's schema does not have it."""
    types = types_of(schema, root)
    children = element.children
    is_list = "array" in types or ("object" not in types and all(child.key == "item" for child in children))
    if not children and not (types & {"array", "object"} and not element.text.strip()):
        return value_of_text(element.text, types)
    if is_list:
        items = item_schema(schema, root)
        return [_value(child, items, root) for child in children]
    found: dict[str, Any] = {}
    for child in children:
        found[child.key] = _value(child, property_schema(schema, child.key, root), root)
    return found
