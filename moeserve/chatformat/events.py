"""The events of a parsed answer, in order. Consecutive text events are pieces of one text; so are consecutive reasoning
events.

Events are structs because parsers make one for each character of a call, and frozen dataclasses are slower.
"""

from __future__ import annotations

import msgspec


class Text(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The beginning of a call. `index` counts calls from 0."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of the JSON text of the call's arguments."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The end of a call, whose arguments are now a complete JSON object."""

    index: int


class CallBroken(msgspec.Struct, frozen=True):
    """A started call is malformed, or the answer ended within it. If the consumer has shown none of the call's events,
    it shows `raw`, the call's whole text, as plain text. Otherwise it shows `rest`, the text after the events."""

    index: int
    raw: str
    rest: str


Event = Text | Reasoning | CallStart | CallArguments | CallEnd | CallBroken
