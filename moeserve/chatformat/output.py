"""An answer's text, taken apart as the model's format asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import msgspec

from .events import CallArguments, Event, Reasoning, Text
from .reasoning import ReasoningParser
from .thought_calls import ThoughtCalls
from .tool_calls import ToolCallParser


class AnswerParser(Protocol):
    """Reads one answer."""

    @property
    def is_thinking(self) -> bool:
        """Whether more text would be thought, as far as is known."""
        ...

    @property
    def is_undecided(self) -> bool:
        """Whether what came last may be calls, or thought."""
        ...

    @property
    def thought_called(self) -> bool:
        """Whether a call has ended the thought."""
        ...

    def push(self, text: str) -> list[Event]: ...

    def finish(self, ended_by: str | None = None) -> list[Event]:
        """No text follows. `ended_by`: the format's tag with which the model has ended the answer, "" for any other
        token; None if the answer was cut off."""
        ...


class OutputParser:
    """The thought first, then calls among the text; either part may be left out."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolCallParser | None,
        offered: Collection[str] = (),
        *,
        calls_end_thoughts: bool = False,
    ) -> None:
        """Calls of the tools `offered` may end a thought; with `calls_end_thoughts`, which a grammar sees to, each
        does."""
        self._reasoning = reasoning
        self._tools = tools
        self._thought: ThoughtCalls | None = None
        if reasoning is not None and tools is not None and offered:
            self._thought = ThoughtCalls(tools, offered, at_once=calls_end_thoughts)

    @property
    def is_thinking(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_thinking and not self.thought_called

    @property
    def is_undecided(self) -> bool:
        return self._thought is not None and self._thought.is_undecided

    @property
    def thought_called(self) -> bool:
        return self._thought is not None and self._thought.has_ended

    def push(self, text: str) -> list[Event]:
        """What more text adds; pieces of one kind are joined."""
        return joined(self._read(self._reasoning.push(text) if self._reasoning else [Text(text)]))

    def finish(self, ended_by: str | None = None) -> list[Event]:
        events = self._read(self._reasoning.finish() if self._reasoning else [])
        if self._thought is not None:
            events += self._thought.finish(ended_by)
        if self._tools is not None:
            events += self._tools.finish(ended_by)
        return joined(events)

    def _read(self, events: list[Event]) -> list[Event]:
        """Finds the calls in the thought and in the text."""
        if self._tools is None:
            return events
        read: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                read += [event] if self._thought is None else self._thought.push(event.text)
            elif isinstance(event, Text):
                text = event.text
                if self._thought is not None:
                    decided, text = self._thought.push_answer(text)
                    read += decided
                read += self._tools.push(text)
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
