"""What an answer's text is made of, in order. The pieces of one kind that follow one another are to be joined.

Parsers make one of each character of a call: structs, for they are made faster than frozen dataclasses.
"""

from __future__ import annotations

import msgspec


class Text(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallStart(msgspec.Struct, frozen=True):
    """Calls are counted from 0."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of the call's arguments."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The arguments are a whole JSON object."""

    index: int


class CallBroken(msgspec.Struct, frozen=True):
    """After its start the call turned out malformed, or the answer ended within it. Whoever has shown nothing of
    it yet shows `raw`, its whole text, as plain text in its place; whoever has shows `rest`, of which nothing has
    been an event."""

    index: int
    raw: str
    rest: str


Event = Text | Reasoning | CallStart | CallArguments | CallEnd | CallBroken
