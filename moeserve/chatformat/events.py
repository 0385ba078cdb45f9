"""What an answer's text is made of, in order. The pieces of one kind that follow one another are to be joined."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments are a whole JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """After its start the call turned out malformed, or the answer ended within it. Whoever has shown nothing of
    it yet shows `raw`, its whole text, as plain text in its place; whoever has shows `rest`, of which nothing has
    been an event."""

    index: int
    raw: str
    rest: str


Event = Text | Reasoning | CallStart | CallArguments | CallEnd | CallBroken
