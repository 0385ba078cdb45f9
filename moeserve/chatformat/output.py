"""Parses an answer's text by the model's format."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import msgspec

from .bare_calls import BareCalls
from .events import CallArguments, Event, Reasoning, Text
from .reasoning_calls import ReasoningCalls
from .tool_calls import ToolCallParser


class AnswerParser(Protocol):
    """Reads one answer, piece by piece, as events: reasoning, text and calls."""

    @property
    def is_thinking(self) -> bool:
        """True if the next text will be reasoning, as far as the text so far shows."""
        ...

    @property
    def is_undecided(self) -> bool:
        """True while it is not known whether the latest text is calls or reasoning. By default a format tells them
        apart at once."""
        return False

    @property
    def reasoning_called(self) -> bool:
        """True if a call has ended the reasoning. By default only the reasoning's own end does."""
        return False

    def push(self, text: str) -> list[Event]: ...

    def finish(self, ended_by: str | None = None) -> list[Event]:
        """Ends the text. `ended_by`: the format's tag that ended the answer, "" for any other token; None if the
        answer was cut off."""
        ...


class ReasoningSplitter(Protocol):
    """Splits an answer into reasoning and text, in which calls still are."""

    @property
    def is_thinking(self) -> bool: ...

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class OutputParser:
    """Parses a model's text: first the reasoning, then text with calls. Either part may be missing."""

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        tools: ToolCallParser | None,
        offered: Collection[str] = (),
        *,
        calls_end_reasoning: bool = False,
        bare: BareCalls | None = None,
    ) -> None:
        """offered: tools whose calls may end the reasoning. calls_end_reasoning: every call ends it, which a grammar
        ensures. bare: reads calls without tags; None: these are text."""
        self._reasoning = reasoning
        self._tools = tools
        self._bare = bare
        self._reasoning_calls: ReasoningCalls | None = None
        if reasoning is not None and tools is not None and offered:
            self._reasoning_calls = ReasoningCalls(tools, offered, at_once=calls_end_reasoning)

    @property
    def is_thinking(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_thinking and not self.reasoning_called

    @property
    def is_undecided(self) -> bool:
        return self._reasoning_calls is not None and self._reasoning_calls.is_undecided

    @property
    def reasoning_called(self) -> bool:
        return self._reasoning_calls is not None and self._reasoning_calls.has_ended

    def push(self, text: str) -> list[Event]:
        """Takes more text. Returns its events, with neighbouring pieces of one kind joined."""
        return joined(self._read(self._reasoning.push(text) if self._reasoning else [Text(text)]))

    def finish(self, ended_by: str | None = None) -> list[Event]:
        events = self._read(self._reasoning.finish() if self._reasoning else [])
        if self._reasoning_calls is not None:
            events += self._reasoning_calls.finish(ended_by)
        if self._tools is not None:
            events += self._tagless(self._tools.finish(ended_by))
        if self._bare is not None:
            events += self._bare.finish(has_ended=ended_by is not None)
        return joined(events)

    def _read(self, events: list[Event]) -> list[Event]:
        """Replaces calls in reasoning and text by events of calls."""
        if self._tools is None:
            return events
        read: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                read += [event] if self._reasoning_calls is None else self._reasoning_calls.push(event.text)
            elif isinstance(event, Text):
                text = event.text
                if self._reasoning_calls is not None:
                    decided, text = self._reasoning_calls.push_answer(text)
                    read += decided
                read += self._tagless(self._tools.push(text))
        return read

    def _tagless(self, events: list[Event]) -> list[Event]:
        return events if self._bare is None else self._bare.read(events)


_PIECES = (Text, Reasoning, CallArguments)


def joined(events: Iterable[Event]) -> list[Event]:
    """Joins neighbouring pieces of one kind, and drops empty texts."""
    out: list[Event] = []
    last: Event | None = None
    more: list[str] = []  # texts to append to `last`, the last event of `out`
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
