"""An answer's text, taken apart as the model's format asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from .events import CallArguments, Event, Reasoning, Text
from .reasoning import ReasoningParser
from .tool_calls import ToolCallParser


class AnswerParser(Protocol):
    """Reads one answer."""

    @property
    def is_thinking(self) -> bool:
        """Whether more text would be thought."""
        ...

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class OutputParser:
    """The thought first, then calls among the text; either part may be left out."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_thinking(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_thinking

    def push(self, text: str) -> list[Event]:
        """What more text adds; pieces of one kind are joined."""
        return joined(self._read_calls(self._reasoning.push(text) if self._reasoning else [Text(text)]))

    def finish(self) -> list[Event]:
        """No text follows."""
        events = self._read_calls(self._reasoning.finish() if self._reasoning else [])
        if self._tools is not None:
            events += self._tools.finish()
        return joined(events)

    def _read_calls(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        read: list[Event] = []
        for event in events:
            read += self._tools.push(event.text) if isinstance(event, Text) else [event]
        return read


_PIECES = (Text, Reasoning, CallArguments)


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbouring pieces of one kind made one; empty texts left out."""
    out: list[Event] = []
    last: Event | None = None
    more: list[str] = []  # texts that belong to `last`, which `out` ends with
    for event in events:
        if isinstance(event, _PIECES):
            if not event.text and not isinstance(event, CallArguments):
                continue
            if type(event) is type(last):
                more.append(event.text)
                continue
        _add_to_last(out, more)
        out.append(event)
        last = event
    _add_to_last(out, more)
    return out


def _add_to_last(out: list[Event], texts: list[str]) -> None:
    if texts:
        assert isinstance(out[-1], _PIECES)
        out[-1] = msgspec.structs.replace(out[-1], text=out[-1].text + "".join(texts))
        texts.clear()
