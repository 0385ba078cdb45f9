"""Finds where the answer begins after the model's reasoning. Stop strings end the answer, and a model also writes them
while it plans the answer."""

from __future__ import annotations

from typing import Literal

from moeserve.messages.sampling import Thinking

# possible: the model may begin to reason. open: it reasons. blank: it has ended its reasoning, and has written blanks.
_State = Literal["possible", "open", "blank", "answer"]


class AnswerStart:
    """Follows a request's tokens up to the answer."""

    def __init__(self, reasoning: Thinking | None) -> None:
        """reasoning: None if the answer has none."""
        self._reasoning = reasoning
        self._state: _State = "answer"
        if reasoning is not None:
            self._state = "open" if reasoning.is_open else "possible"
        self._before = -1  # the token before

    def push(self, token_id: int, text: str) -> bool:
        """Takes the next token, with the text that it completes. Returns whether a stop string may end with it: in the
        answer, and with the token that closes the reasoning, so that a stop string may be its closing tag."""
        if self._reasoning is None or self._state == "answer":
            return True
        before, self._before = self._before, token_id
        if self._state == "open":
            return self._has_closed(self._reasoning, token_id, before)
        if self._state == "possible" and token_id == self._reasoning.open_token:
            self._state = "open"
            return False
        if text.strip():
            self._state = "answer"
        return self._state != "blank"

    def _has_closed(self, reasoning: Thinking, token_id: int, before: int) -> bool:
        if token_id == reasoning.close_token:
            self._state = "blank"
        elif token_id == reasoning.call_token and reasoning.call_lead in (None, before):
            self._state = "answer"
        return self._state != "open"
