"""Calls within reasoning. Some models call a tool without closing their reasoning, and then end the answer. Others
write a tentative call, continue reasoning, and make the call after it.

A well-formed call of an offered tool ends the reasoning in three cases: the reasoning is never closed; nothing follows
its closing tag; or only white space stands between the call and the closing tag, and no other call follows. Otherwise
the call is tentative and stays part of the reasoning: the model reasons for more than MAX_TEXT further characters,
closes its reasoning after further text and then answers, or calls a tool after closing it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from .events import CallBroken, CallEnd, CallStart, Event, Reasoning, Text
from .tool_calls import ToolCallParser

# After a call in unclosed reasoning, at most this many further characters are held back.
MAX_TEXT: Final = 2000


class ReasoningCalls:
    """Reads the reasoning. It also reads the answer after it, until it is clear whether the calls are tentative."""

    def __init__(self, tools: ToolCallParser, offered: Collection[str], at_once: bool) -> None:
        """offered: the tools that may be called. at_once: no call is tentative, because a grammar enforces the call
        that ends the reasoning."""
        self._tools = tools
        self._parser = tools.anew()
        self._offered = offered
        self._at_once = at_once
        self._raw: list[str] = []  # characters held back
        self._events: list[Event] = []  # the events of these characters if the reasoning has ended
        self._name = ""
        self._has_call = False
        self._text_behind = ""  # text of the reasoning after the last call
        self._answer = ""  # held-back text after the reasoning
        self.has_ended = False  # a call has ended the reasoning; this object reads the rest of the answer

    @property
    def is_undecided(self) -> bool:
        """True while it is not decided whether the latest text is calls or reasoning."""
        return not self.has_ended and (self._has_call or not self._parser.in_text)

    def push(self, text: str) -> list[Event]:
        """Takes text of the reasoning, or the text after a call that has ended the reasoning. Returns the events that
        are now certain."""
        events: list[Event] = []
        is_plain = self._tools.starts.isdisjoint(text) and self._parser.in_text and not self._has_call
        for piece in [text] if is_plain else text:
            self._raw += piece
            for event in self._parser.push(piece):
                self._take(event, events)
        return events

    def push_answer(self, text: str) -> tuple[list[Event], str]:
        """Takes text after the closing tag. Returns the events that are now certain, and the text for the answer's
        parser."""
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
        """Ends the text as `AnswerParser.finish` does."""
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
