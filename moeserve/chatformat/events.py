"""The events of a parsed answer, in order. Consecutive pieces of one kind belong together.

They are structs because parsers make one for each character of a call: frozen dataclasses would be slower.
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
    """More of the JSON text of the call's arguments."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The end of a call, whose arguments are now a complete JSON object."""

    index: int


class CallBroken(msgspec.Struct, frozen=True):
    """A call that has started is malformed, or the answer ended within it. A consumer that has shown nothing of the
    call shows `raw`, its whole text, as plain text; one that has shown events of it shows `rest`, the text after
    them."""

    index: int
    raw: str
    rest: str


Event = Text | Reasoning | CallStart | CallArguments | CallEnd | CallBroken
