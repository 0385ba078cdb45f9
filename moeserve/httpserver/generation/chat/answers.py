"""One choice's answer as the chat APIs show it: thinking, text and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
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

    def __init__(
        self,
        parser: AnswerParser,
        show_reasoning: bool = True,
        *,
        end_tags: Mapping[int, str] | None = None,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        """end_tags: tokens of the format that may end an answer, with their texts, which are not in the answer's text.
        stop_token_ids: the client's stop tokens."""
        self._parser = parser
        self._show_reasoning = show_reasoning
        self._end_tags = end_tags or {}
        self._stop_token_ids = stop_token_ids
        self._undecided = 0  # tokens that count as reasoning unless they turn out to belong to a call
        self.reasoning_tokens = 0
        self.num_calls = 0  # complete ones

    def read(self, item: TextItem) -> list[Event]:
        """Returns the item's events; the last item also releases text that was held back."""
        before = self._parser.is_thinking
        events = self._parser.push(item.text)
        if before or self._parser.is_thinking:
            self._undecided += len(item.token_ids)
        if item.finish_reason is not None:
            events += self._parser.finish(self._ended_by(item))
        if item.finish_reason is not None or not self._parser.is_undecided:
            self.reasoning_tokens += 0 if self._parser.reasoning_called else self._undecided
            self._undecided = 0
        self.num_calls += sum(isinstance(event, CallEnd) for event in events)
        if self._show_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]

    def _ended_by(self, item: TextItem) -> str | None:
        """Returns the text of the tag that ended the answer; None if no tag did."""
        token_id = item.stop_reason
        if item.finish_reason != "stop" or isinstance(token_id, str) or token_id in self._stop_token_ids:
            return None
        return "" if token_id is None else self._end_tags.get(token_id, "")


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
