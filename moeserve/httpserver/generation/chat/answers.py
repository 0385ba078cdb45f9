"""One choice's answer as the chat APIs show it: thinking, text and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from moeserve.chatformat.events import (
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from moeserve.chatformat.output import AnswerParser
from moeserve.messages.schema import TextItem


class AnswerReader:
    """Turns the items of one choice into events, and counts the tokens of its thinking, tags included."""

    def __init__(self, parser: AnswerParser, show_reasoning: bool = True) -> None:
        self._parser = parser
        self._show_reasoning = show_reasoning
        self.reasoning_tokens = 0
        self.num_calls = 0  # complete ones

    def read(self, item: TextItem) -> list[Event]:
        """Returns the item's events; the last item also releases text that was held back."""
        before = self._parser.is_thinking
        events = self._parser.push(item.text)
        if before or self._parser.is_thinking:
            self.reasoning_tokens += len(item.token_ids)
        if item.finish_reason is not None:
            events += self._parser.finish()
        self.num_calls += sum(isinstance(event, CallEnd) for event in events)
        if self._show_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""  # JSON


@dataclass
class Answer:
    """A complete answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Answer:
        answer = cls()
        for event in events:
            match event:
                case Text(text):
                    answer.text += text
                case Reasoning(text):
                    answer.reasoning += text
                case CallStart(_, name):
                    answer.calls.append(Call(new_call_id(), name))
                case CallArguments(_, text):
                    answer.calls[-1].arguments += text
                case CallBroken(_, raw, _):
                    answer.calls.pop()
                    answer.text += raw
        return answer


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
