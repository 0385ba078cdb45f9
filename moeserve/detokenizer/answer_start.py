"""Finds where the answer begins after the model's reasoning. Stop strings end the answer, and a model also writes them
while it plans the answer."""

from __future__ import annotations

import re
from typing import Literal, Protocol

from moeserve.messages.reasoning import Headers, Thinking

# possible: the model may begin to reason. open: it reasons. blank: it has ended its reasoning, and has written blanks.
_State = Literal["possible", "open", "blank", "answer"]


class AnswerStart(Protocol):
    """Follows a request's tokens up to the answer."""

    def ends_reasoning(self, token_id: int) -> bool:
        """Returns whether this token, which is pushed next, ends the reasoning."""
        ...

    def push(self, token_id: int, text: str) -> bool:
        """Takes the next token, with the text that it completes. Returns whether a stop string may end with it: in the
        answer, and with the token that closes the reasoning, so that a stop string may be its closing tag."""
        ...


def answer_start(reasoning: Thinking | Headers | None) -> AnswerStart:
    """reasoning: None if the answer has none."""
    return InMessages(reasoning) if isinstance(reasoning, Headers) else AfterTags(reasoning)


class AfterTags:
    """Reasoning between tags, before the answer."""

    def __init__(self, reasoning: Thinking | None) -> None:
        self._reasoning = reasoning
        self._state: _State = "answer"
        if reasoning is not None:
            self._state = "open" if reasoning.is_open else "possible"
        self._before = -1  # the token before

    def ends_reasoning(self, token_id: int) -> bool:
        reasoning = self._reasoning
        if reasoning is None or self._state != "open":
            return False
        is_call = token_id == reasoning.call_token and reasoning.call_lead in (None, self._before)
        return is_call or token_id == reasoning.close_token

    def push(self, token_id: int, text: str) -> bool:
        if self._reasoning is None or self._state == "answer":
            return True
        ends = self.ends_reasoning(token_id)
        self._before = token_id
        if self._state == "open":
            if ends:
                self._state = "blank" if token_id == self._reasoning.close_token else "answer"
            return ends
        if self._state == "possible" and token_id == self._reasoning.open_token:
            self._state = "open"
            return False
        if text.strip():
            self._state = "answer"
        return self._state != "blank"


class InMessages:
    """Reasoning in messages of its own. Headers are neither reasoning nor answer: no stop string ends in them."""

    def __init__(self, reasoning: Headers) -> None:
        self._reasoning = reasoning
        self._is_open = reasoning.is_open
        self._in_header = False
        self._header: list[int] = []  # its first tokens: one more than `mark` has
        self._part = None if reasoning.header is None else re.compile(reasoning.header)
        self._text = ""  # of the header, behind the token that begins it

    def ends_reasoning(self, token_id: int) -> bool:
        return self._is_open and self._closes(token_id)

    def push(self, token_id: int, text: str) -> bool:
        reasoning = self._reasoning
        if self._closes(token_id):
            ends, self._is_open = self._is_open, False
            self._in_header = token_id in reasoning.opening
            self._header = [token_id]
            self._text = ""
            return ends or not self._in_header
        if self._in_header:
            is_text = token_id != reasoning.end and self._leaves_header(text)
            self._in_header = token_id != reasoning.end and not is_text
            header = self._header[: len(reasoning.mark)] if is_text else self._header
            self._is_open = not self._in_header and tuple(header) == reasoning.mark
            if len(self._header) <= len(reasoning.mark):
                self._header.append(token_id)
            return is_text and not self._is_open
        return not self._is_open

    def _leaves_header(self, text: str) -> bool:
        """Takes the next text of a header. Returns whether it belongs to the message's text instead."""
        if self._part is None:
            return False
        self._text += text
        return self._part.fullmatch(self._text) is None

    def _closes(self, token_id: int) -> bool:
        return token_id in self._reasoning.closing or token_id in self._reasoning.opening
