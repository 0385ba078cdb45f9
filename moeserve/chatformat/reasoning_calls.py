"""Calls within reasoning. Some models call a tool without ending their reasoning, and then end the answer. Others
write a draft of a call, go on thinking, and call the tool after the reasoning.

A well-formed call of an offered tool ends the reasoning if the answer ends behind the call, if nothing but the call
stands before the reasoning's closing tag, or if the reasoning is never closed. The call is a draft, and stays part of
the reasoning, if the model goes on thinking for long, or closes the reasoning and then calls a tool or continues its
answer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from .events import CallBroken, CallEnd, CallStart, Event, Reasoning, Text
from .tool_calls import ToolCallParser

MAX_TEXT: Final = (
    2000  # characters behind a call, of reasoning that is not closed; until then they are held back
)


class ReasoningCalls:
    """Reads the text of the reasoning, and of the answer behind it until what the calls are is known."""

    def __init__(self, tools: ToolCallParser, offered: Collection[str], at_once: bool) -> None:
        """`offered`: the tools that may be called. `at_once`: there are no drafts, for a grammar makes the call that a
        reasoning ends with."""
        self._tools = tools
        self._parser = tools.anew()
        self._offered = offered
        self._at_once = at_once
        self._raw: list[str] = []  # characters that have not been given back
        self._events: list[Event] = []  # what they are if the reasoning has ended
        self._name = ""
        self._has_call = False
        self._text_behind = ""  # the last call, within the reasoning
        self._answer = ""  # behind the reasoning, held back
        self.has_ended = False  # a call has ended the reasoning; all that follows is read here

    @property
    def is_undecided(self) -> bool:
        """Whether what came last may be calls, or the reasoning."""
        return not self.has_ended and (self._has_call or not self._parser.in_text)

    def push(self, text: str) -> list[Event]:
        """`text` is of the reasoning, or behind a call that has ended it."""
        events: list[Event] = []
        is_plain = self._tools.starts.isdisjoint(text) and self._parser.in_text and not self._has_call
        for piece in [text] if is_plain else text:
            self._raw += piece
            for event in self._parser.push(piece):
                self._take(event, events)
        return events

    def push_answer(self, text: str) -> tuple[list[Event], str]:
        """`text` comes behind the closing tag. Returns what is known by it, and what another parser is to read."""
        if self.has_ended:
            return self._parser.push(text), ""
        if not self._has_call:
            return self._as_reasoning(), text
        self._answer += text
        begun = self._answer.lstrip()
        openings = self._tools.openings
        if not begun or any(tag != begun and tag.startswith(begun) for tag in openings):
            return [], ""
        text, self._answer = self._answer, ""
        if self._text_behind.strip() or begun.startswith(openings):
            return self._as_reasoning(), text
        return self._ended() + self._parser.push(text), ""

    def finish(self, ended_by: str | None) -> list[Event]:
        """No text follows: see AnswerParser."""
        events: list[Event] = []
        if not self.has_ended and not self._has_call:
            for event in self._parser.finish(ended_by):
                self._take(event, events)
            return events + (self._ended() if self._has_call else self._as_reasoning())
        events += self._ended() + self._parser.push(self._answer)
        return events + self._parser.finish(ended_by)

    def _take(self, event: Event, events: list[Event]) -> None:
        if self.has_ended:
            events.append(event)
            return
        text = event.text if isinstance(event, Text) else event.raw if isinstance(event, CallBroken) else ""
        if text and not self._has_call:
            self._events.clear()
            del self._raw[: len(text)]
            events.append(Reasoning(text))
            return
        self._events.append(event)
        self._text_behind += text
        match event:
            case CallStart(_, name):
                self._name = name
            case CallEnd() if not self._has_call and self._name not in self._offered:
                events += self._as_reasoning()
            case CallEnd():
                self._has_call = True
                self._text_behind = ""
                if self._at_once:
                    events += self._ended()
        if len(self._text_behind) > MAX_TEXT:
            events += self._as_reasoning()

    def _as_reasoning(self) -> list[Event]:
        if not self._raw:
            return []
        text = "".join(self._raw)
        self._raw.clear()
        self._events.clear()
        self._has_call = False
        self._text_behind = ""
        self._parser = self._tools.anew()
        return [Reasoning(text)]

    def _ended(self) -> list[Event]:
        events = self._events
        self.has_ended = True
        self._raw, self._events = [], []
        return events
